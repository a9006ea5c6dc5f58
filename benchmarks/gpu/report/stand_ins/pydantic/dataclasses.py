"""Dataclasses whose values are not checked, in place of pydantic's."""

import dataclasses
from typing import Any


def dataclass(*, config: object = None, **options: Any) -> Any:
    """Make a plain dataclass. config: what pydantic would check by."""
    return dataclasses.dataclass(**options)
