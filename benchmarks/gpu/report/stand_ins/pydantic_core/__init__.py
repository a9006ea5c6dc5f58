"""The mark of a setting that has no default, in place of pydantic_core's."""

PydanticUndefined = object()
