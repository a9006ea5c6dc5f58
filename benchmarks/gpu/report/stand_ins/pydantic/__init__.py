"""The few names of pydantic by which the engine's settings are declared, for a machine that has no pydantic.

Settings keep their names, defaults and help, and nothing is checked or converted: the report makes its settings itself.
Whoever serves needs pydantic. gpu_report.py puts this folder on the path only where pydantic is not installed, and says
so.
"""

from typing import Any

IS_STAND_IN = True


class ValidationError(ValueError):
    """Error that nothing raises: nothing is checked."""


class Field:
    """Bounds and help of a setting."""

    def __init__(self, **told: Any) -> None:
        self.told = told


class BeforeValidator:
    """Function that would convert a setting."""

    def __init__(self, convert: Any) -> None:
        self.convert = convert


def ConfigDict(**told: Any) -> dict[str, Any]:
    """Return the options of a class of settings."""
    return told


def model_validator(mode: str) -> Any:
    """Return a decorator of a check that is not carried out."""
    return lambda check: check
