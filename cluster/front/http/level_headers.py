"""Reads the service level that an HTTP call asks for in its headers.

x-diptych-ttft-ms, x-diptych-tpot-ms    milliseconds
x-diptych-admission                     wait | refuse
"""

import re

from starlette.datastructures import Headers

from ....workers.common.errors import InvalidRequest
from ....workers.common.request import TPOT_BOUNDS_S, TTFT_BOUNDS_S
from ..levels import MAX_SHOWN_CHARS, NO_LEVEL, AskedLevel

TTFT, TPOT, ADMISSION = "x-diptych-ttft-ms", "x-diptych-tpot-ms", "x-diptych-admission"
_PREFIX = b"x-diptych-"
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def level_of(headers: Headers) -> AskedLevel:
    """Level that the headers ask for. Raises InvalidRequest, which names the header."""
    if not [key for key, _ in headers.raw if key.startswith(_PREFIX)]:
        return NO_LEVEL
    ttft_s = _seconds(headers, TTFT, TTFT_BOUNDS_S)
    tpot_s = _seconds(headers, TPOT, TPOT_BOUNDS_S)
    match _only(headers, ADMISSION):
        case None | "wait" | "refuse" as admission:
            return AskedLevel(ttft_s=ttft_s, tpot_s=tpot_s, admission=admission)
        case other:
            raise _wrong(ADMISSION, "wait or refuse", other)


def _seconds(headers: Headers, name: str, bounds_s: tuple[float, float]) -> float | None:
    value = _only(headers, name)
    if value is None:
        return None
    low, high = (1000 * bound for bound in bounds_s)
    if not (_NUMBER.fullmatch(value) and low <= float(value) <= high):
        raise _wrong(name, f"a number of milliseconds in [{low:g}, {high:g}]", value)
    return min(max(float(value) / 1000, bounds_s[0]), bounds_s[1])  # whatever the division rounds to


def _only(headers: Headers, name: str) -> str | None:
    values = headers.getlist(name)
    if len(values) > 1:
        raise InvalidRequest(f"the header {name} was sent {len(values)} times: send it once", param=name)
    return values[0] if values else None


def _wrong(name: str, expected: str, value: str) -> InvalidRequest:
    return InvalidRequest(f"the header {name} must be {expected}, got {value[:MAX_SHOWN_CHARS]!r}", param=name)
