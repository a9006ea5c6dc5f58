"""OpenAI's `prediction` of a chat: text that the answer is expected to be like."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from .fields import FieldCheck, Known
from .messages import Many, text_of


class Prediction(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: Literal["content"]
    content: str | Many[dict[str, Any]]

    def text(self, fields: FieldCheck) -> str | None:
        """Whole text, its parts joined; None where it is empty. Raises InvalidRequest."""
        fields.check(self.model_extra or {}, _KNOWN, "prediction.")
        if isinstance(self.content, str):
            return self.content or None
        return "".join(text_of(part, f"prediction.content[{i}]", fields) for i, part in enumerate(self.content)) or None


_KNOWN = Known(tuple(Prediction.model_fields), {})
