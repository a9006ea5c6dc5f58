"""Messages of the gRPC call Embed: EmbedRequest -> GenerationSpec, embeddings -> EmbedResponses."""

from collections.abc import Iterator, Sequence

from ....proto import inference_pb2
from ....workers.common.errors import InvalidRequest
from ....workers.common.request import check_prompt_length
from ....workers.core.embedding import Vector
from ...tokens.prompt_encoding import Prompt
from ..embedding_run import NOTHING_SAMPLED, EmbeddingRun, check_inputs
from ..front_door import FrontDoor, GenerationSpec
from .level_fields import level_of
from .prompt_fields import truncation_of


def embedding_spec(request: inference_pb2.EmbedRequest, timeout_s: float | None, door: FrontDoor) -> GenerationSpec:
    """Spec of a message. Checks counts before it copies anything. Raises InvalidRequest, Unavailable."""
    most = door.model().max_context_tokens
    is_cut = request.HasField("truncate_prompt_tokens")
    check_inputs(len(request.inputs), 0, door.limits.max_inputs, door.limits.max_answer_floats)
    return GenerationSpec(
        prompts=[_prompt(i, given, None if is_cut else most) for i, given in enumerate(request.inputs)],
        truncation=truncation_of(request, "right"),
        sampling=NOTHING_SAMPLED,
        timeout_s=timeout_s,
        model=request.model or None,
        cache_salt=request.cache_salt,
        level=level_of(request),
    )


def _prompt(index: int, given: inference_pb2.EmbedInput, max_context_tokens: int | None) -> Prompt:
    """`max_context_tokens`: None: a longer one is cut later."""
    match given.WhichOneof("input"):
        case "text":
            return given.text
        case "tokens":
            if max_context_tokens is not None:
                check_prompt_length(len(given.tokens.ids), max_context_tokens, embeds=True)
            return tuple(given.tokens.ids)
        case _:
            raise InvalidRequest(f"inputs[{index}] is missing: set its text or tokens", param=f"inputs[{index}]")


def embed_responses(
    request_id: str, vectors: Sequence[Vector], run: EmbeddingRun
) -> Iterator[inference_pb2.EmbedResponse]:
    """One message for each embedding. The last has what belongs to the whole call."""
    for i, vector in enumerate(vectors):
        response = inference_pb2.EmbedResponse(request_id=request_id, index=i, embedding=vector.tolist())
        if i == len(vectors) - 1:
            usage = run.usage
            response.usage.prompt_tokens = usage.prompt_tokens
            response.usage.cached_tokens, response.usage.stored_tokens = usage.cached_tokens, usage.stored_tokens
            response.service_tier = run.service_tier
        yield response
