"""The few names of pydantic by which the engine's settings are declared, for a machine that has no pydantic.

Nothing is checked: the report makes its settings itself. Whoever serves needs pydantic. gpu_report.py puts this folder
on the path only where pydantic is not installed, and says so.
"""

from typing import Any

IS_STAND_IN = True


class Field:
    """Bounds and help of a setting: metadata of its type, which nobody reads here."""

    def __init__(self, **told: Any) -> None:
        self.told = told


class BeforeValidator:
    """Function that would convert a setting."""

    def __init__(self, convert: Any) -> None:
        self.convert = convert


def ConfigDict(**told: Any) -> dict[str, Any]:
    """Return the options of a class of settings."""
    return told
