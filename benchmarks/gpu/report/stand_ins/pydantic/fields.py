"""Description of a setting, as it is read from a class of settings."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class FieldInfo:
    """Type, default and help of a setting."""

    annotation: Any
    default: Any
    description: str | None = None
    metadata: list[Any] = field(default_factory=list)
