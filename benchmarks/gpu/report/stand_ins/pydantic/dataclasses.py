"""Dataclasses whose values are not checked, in place of pydantic's."""

import dataclasses
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic_core import PydanticUndefined

from . import Field
from .fields import FieldInfo


def dataclass(*, config: object = None, **options: Any) -> Any:
    """Make a plain dataclass that knows its settings. config: what pydantic would check by."""

    def made(of: type) -> type:
        kind = dataclasses.dataclass(**options)(of)
        hints = get_type_hints(kind, include_extras=True)
        own = dataclasses.fields(kind)
        kind.__pydantic_fields__ = {each.name: _info(hints[each.name], each.default) for each in own}
        return kind

    return made


def _info(annotation: Any, default: Any) -> FieldInfo:
    metadata: tuple[Any, ...] = ()
    if get_origin(annotation) is Annotated:
        annotation, *told = get_args(annotation)
        metadata = tuple(told)
    help_ = next((each.told["description"] for each in metadata if _has_help(each)), None)
    is_required = default is dataclasses.MISSING
    rest = [each for each in metadata if not isinstance(each, Field)]
    return FieldInfo(annotation, PydanticUndefined if is_required else default, help_, rest)


def _has_help(each: Any) -> bool:
    return isinstance(each, Field) and "description" in each.told
