"""OpenAI's embeddings over a FrontDoor.

POST /v1/embeddings
"""

from starlette.requests import Request
from starlette.responses import Response

from ....workers.common.errors import InvalidRequest
from ...telemetry.call_trace import TRACE
from ..embedding_run import EmbeddingForm, EmbeddingRun
from ..front_door import FrontDoor
from ..json_parts import to_json
from ..openai.embeddings import EmbeddingsBody, embeddings_object
from .calls import CallReader
from .edge import CALL
from .errors import call_id
from .stream import while_connected


class EmbeddingsApi:
    def __init__(self, door: FrontDoor, calls: CallReader) -> None:
        self._door = door
        self._calls = calls

    async def create(self, request: Request) -> Response:
        try:
            call = await self._calls.read(EmbeddingsBody, request)
            form = call.embedding or EmbeddingForm()
            state, its_id = request.scope["state"], f"embd-{call_id(request)}"
            run = await self._door.embed(call.spec, form.dimensions, its_id, state.get(CALL), state.get(TRACE))
        except InvalidRequest as e:
            e.param = "input" if e.param == "prompt" else e.param
            raise
        model = call.spec.model or self._door.model().name
        whole = await while_connected(request.scope, self._whole(run, model, form))
        return Response(whole, media_type="application/json")

    async def _whole(self, run: EmbeddingRun, model: str, form: EmbeddingForm) -> bytes:
        with self._door.embeddings.share() as held:
            held.take(run.num_floats)
            return await to_json(await embeddings_object(await run.vectors(), run.usage, model, form))
