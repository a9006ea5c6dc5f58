"""Body and answer of OpenAI's /v1/embeddings."""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from ....workers.common.errors import InvalidRequest
from ....workers.core.embedding import Vector
from ..access.usage import Usage
from ..embedding_run import NOTHING_SAMPLED, EmbeddingForm
from ..front_door import GenerationSpec
from ..json_parts import Written
from ..levels import AskedLevel
from .fields import NO_EFFECT, FieldCheck, Known
from .format import Include
from .messages import Many
from .types import NumKept, ParsedRequest, Side, prompts_of, truncation


class EmbeddingsBody(BaseModel):
    """Body of POST /v1/embeddings."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    expected: ClassVar[Mapping[str, str]] = {
        "input": "a string, an array of strings, an array of token ids, or an array of arrays of token ids"
    }

    input: str | Many[int] | Many[str] | Many[Many[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    service_tier: str | None = None
    cache_salt: str | None = None  # vLLM's: inputs with the same salt share cached prefixes
    add_special_tokens: bool | None = None  # vLLM's, and the next two; false leaves out the post-processor's
    truncate_prompt_tokens: NumKept | None = None
    truncation_side: Side | None = None  # at which tokens are cut off; None: right
    timeout_s: float | None = None  # Diptych's

    @classmethod
    def known(cls) -> Known:
        return _KNOWN

    def call(self) -> ParsedRequest:
        """Parsed request. Raises InvalidRequest."""
        fields = FieldCheck()
        fields.check(self.model_extra or {}, self.known())
        if self.cache_salt == "":
            raise InvalidRequest("cache_salt must be a non-empty string: leave it out to share", param="cache_salt")
        kept = self.truncate_prompt_tokens
        spec = GenerationSpec(
            prompts=prompts_of(self.input),
            special=self.add_special_tokens is not False,
            sampling=NOTHING_SAMPLED,
            timeout_s=self.timeout_s,
            model=self.model,
            cache_salt=self.cache_salt or "",
            truncation=truncation(kept, self.truncation_side or "right") if kept is not None else None,
            level=AskedLevel(self.service_tier),
        )
        form = EmbeddingForm(self.dimensions, as_base64=self.encoding_format == "base64")
        return ParsedRequest(spec, Include(), stream=False, echo=False, unknown=fields.unknown, embedding=form)


_KNOWN = Known(
    tuple(EmbeddingsBody.model_fields),
    {
        # vLLM's
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "messages": (),
        "mm_processor_kwargs": ({},),
        "normalize": (),
        "priority": (0,),
        "request_id": (),
        "use_activation": (),
    },
    NO_EFFECT,
)


async def embeddings_object(vectors: Sequence[Vector], usage: Usage, model: str, form: EmbeddingForm) -> dict[str, Any]:
    """OpenAI's answer. The event loop runs between its embeddings."""
    parts: list[str] = []
    for i, vector in enumerate(vectors):
        parts.append(f'{{"object":"embedding","index":{i},"embedding":{_written(vector, form)}}}')
        await asyncio.sleep(0)
    return {
        "object": "list",
        "data": Written(tuple(parts)),
        "model": model,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.prompt_tokens,
            "prompt_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.stored_tokens,
            },
        },
    }


def _written(vector: Vector, form: EmbeddingForm) -> str:
    """JSON of an embedding: a list of numbers that are read as the same float32, or a string of their bytes."""
    if form.as_base64:
        return f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode()}"'
    return f"[{','.join(['%.9g' % number for number in vector.tolist()])}]"  # noqa: UP031 (twice as fast)
