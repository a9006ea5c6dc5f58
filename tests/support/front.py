"""A front door that a person can compute by hand: a token is a byte, and the answer is the prompt again."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from diptych.cluster.common.admission import RouteForecast, RouterOutlook
from diptych.cluster.common.config import TlsConfig
from diptych.cluster.common.prediction import Level
from diptych.cluster.common.timings import RequestTimings
from diptych.cluster.common.worker_stats import NO_DRAFTS, Drafts
from diptych.cluster.front.access.key_ring import KeyRing
from diptych.cluster.front.access.metrics import KeyMetrics
from diptych.cluster.front.dashboard.snapshots import RouterIdentity, Snapshots
from diptych.cluster.front.front_door import FrontDoor
from diptych.cluster.front.grpc.api import InferenceServer
from diptych.cluster.front.http.api import make_app
from diptych.cluster.front.http.edge import AccessPolicy
from diptych.cluster.front.http.metrics import HttpMetrics
from diptych.cluster.front.http.server import bind, serve_http
from diptych.cluster.front.levels import ServiceLevels
from diptych.cluster.front.limits import ConnectionLimits, RequestLimits
from diptych.cluster.front.responses.store import StoreLimits
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.cluster.routing.token_source import Health, TokenDelta, TokenLogprob
from diptych.cluster.telemetry.call_trace import Tracer
from diptych.cluster.tokens.tokenizer import Tokenizer as DiptychTokenizer
from diptych.workers.common.errors import DiptychError, Overloaded
from diptych.workers.common.event_loop import new_event_loop
from diptych.workers.common.prompt_logprobs import PromptLogprobs
from diptych.workers.common.request import FinishReason, Request
from diptych.workers.core.embedding import EmbeddingSpec, Vector
from diptych.workers.core.runner import ModelInfo

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
END, CONTEXT = 256, 512
TIMINGS = RequestTimings(0.25, 0.5, 0.25, 0.125, 0.25, 0.5, 0.125, 0.0625, 0.5, 0.0, 4096, "nixl")


def byte_tokenizer(template: str = TEMPLATE) -> DiptychTokenizer:
    """Ids 0..255 are the bytes themselves (so text is its UTF-8), 256 ends, 257..259 are the roles."""
    return DiptychTokenizer(byte_backend(), {"eos_token": "<|end|>"}, template)


def byte_backend() -> Tokenizer:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    char = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    backend = Tokenizer(models.BPE(vocab={char[b]: b for b in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return backend


def echo_embedding(token_ids: Sequence[int]) -> Vector:
    """Embedding of a prompt: its length, the sum of its ids, its first and its last one, normalised."""
    numbers = np.array([len(token_ids), sum(token_ids), token_ids[0], token_ids[-1]], dtype=np.float32)
    return numbers / np.linalg.norm(numbers)


class Echo:
    """A TokenSource that answers with its prompt, byte by byte, again and again; it ends with END after `laps`.

    What was asked is in `requests`, the ids whose streams ended in `closed`. While `gate` is clear, no stream goes
    beyond `gate_after` tokens.
    """

    def __init__(self, laps: int | None = None) -> None:
        self.laps = laps
        self.requests: list[Request] = []
        self.closed: list[str] = []
        self.num_delivered = 0  # deltas, over all streams
        self.all_closed = threading.Event()  # set while no stream is open, once one was
        self._started = (0, threading.Event())
        self.gate = asyncio.Event()
        self.gate.set()
        self.gate_after = 0
        self.admit_error: DiptychError | None = None
        self.fail: Callable[[int], DiptychError | None] = lambda _: None  # of the number of tokens so far
        self.model_error: DiptychError | None = None
        self.ready = True
        self.decode_tokens: dict[str, int] = {}
        self.may_be_empty = False
        times = RouteForecast(0.25, 0.125, 0.01), RouteForecast(0.125, 0.0, 0.01)
        self.outlook_now = RouterOutlook(0, 100, 1.0, Level(1.0, 0.1), *times)  # but for the number of requests
        self.tokens_a_delta = 1
        self.prompt_parts = 2  # of the log-probabilities of a prompt: steps of its prefill
        self.drafts_a_token = NO_DRAFTS  # verified
        self.num_stored = 0  # tokens of each prompt that were added to a prefix cache
        self.num_likelier = 0  # number of more likely tokens for each reported token
        self.context = CONTEXT
        self.vocab_size = 260
        self.embedding: EmbeddingSpec | None = EmbeddingSpec(4, may_be_cut=True)
        self.answer: tuple[int, ...] = ()  # tokens of all answers, in place of those of the prompt
        self.stop_id = END

    def all_started(self, num: int) -> threading.Event:
        """Set when this many streams have begun."""
        self._started = (num, threading.Event())
        self._note_started()
        return self._started[1]

    def _note_started(self) -> None:
        num, event = self._started
        if len(self.requests) >= num:
            event.set()

    def model(self) -> ModelInfo:
        if self.model_error:
            raise self.model_error
        end = (END,)
        return ModelInfo("echo", "EchoForCausalLM", self.vocab_size, self.context, end, "float32", (), self.embedding)

    def admit(self, num_sequences: int) -> None:
        if self.admit_error:
            raise self.admit_error
        if num_sequences > 100:
            raise Overloaded("full: try again", retry_after_s=2.5)

    async def stream(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        self.all_closed.clear()
        self._note_started()
        try:
            if request.embeds:
                yield await self._embed(request)
                return
            made = 0
            for tokens in self._answer(request):
                if made >= self.gate_after:
                    await self.gate.wait()
                if error := self.fail(made):
                    raise error
                made += len(tokens)
                is_end = tokens[-1] == self.stop_id and not request.sampling.ignore_eos
                finish = FinishReason.STOP if is_end else None
                if finish is None and made == request.sampling.max_tokens:
                    finish = FinishReason.LENGTH
                self.num_delivered += 1
                cached, stored = (3, self.num_stored) if made == len(tokens) else (0, 0)
                # It takes a second a token.
                timings = TIMINGS if made == len(tokens) or finish is not None else None
                prompt = self._prompt_logprobs(request) if made == len(tokens) else ()
                logprobs = _logprobs(request, tokens, self.num_likelier)
                drafts = Drafts(*(made * num for num in self.drafts_a_token))
                yield TokenDelta(
                    tuple(tokens), logprobs, finish, cached, made, timings, prompt, drafts, num_stored_tokens=stored
                )
                await asyncio.sleep(0)
        finally:
            self.closed.append(request.request_id)
            if len(self.closed) == len(self.requests):
                self.all_closed.set()

    def _answer(self, request: Request) -> list[list[int]]:
        prompt = list(self.answer) or [t for t in request.prompt_token_ids if t < END]
        num = request.sampling.max_tokens
        laps = -(-num // len(prompt)) if self.laps is None else self.laps
        tokens = (prompt * laps + [END] * (self.laps is not None))[:num]
        step = self.tokens_a_delta
        return [tokens[i : i + step] for i in range(0, len(tokens), step)]

    def _prompt_logprobs(self, request: Request) -> tuple[PromptLogprobs, ...]:
        """Return those of the prompt, likewise; a token's rank is its id."""
        k, ids = request.sampling.prompt_logprobs, np.array(request.prompt_token_ids, dtype=np.int32)
        if k is None or len(ids) < 2:
            return ()
        top = ids[:, None] + np.arange(-self.num_likelier, k - self.num_likelier, dtype=np.int32)
        logprobs, top_logprobs = ((-each / 100).astype(np.float32) for each in (ids[1:], top[1:]))
        whole = PromptLogprobs(1, logprobs, ids[1:], top[1:], top_logprobs)
        return tuple(whole.pieces(-(-len(whole) // self.prompt_parts)))

    async def _embed(self, request: Request) -> TokenDelta:
        await self.gate.wait()
        if error := self.fail(len(request.prompt_token_ids)):
            raise error
        vector = echo_embedding(request.prompt_token_ids)
        return TokenDelta((), (), FinishReason.STOP, 3, embedding=vector, num_stored_tokens=self.num_stored)

    def health(self) -> Health:
        counts = dict(self.decode_tokens)
        return Health(self.ready, 1, 2, decode_tokens=counts, may_be_empty=self.may_be_empty)

    def outlook(self) -> RouterOutlook:
        return replace(self.outlook_now, num_requests=len(self.requests) - len(self.closed))

    def metrics(self) -> bytes:
        return b"diptych_requests_total 7\n"


def _logprobs(request: Request, tokens: Sequence[int], num_likelier: int) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of token t: -t/100; the k most likely are the `num_likelier` before it, it and those
    after it."""
    k = request.sampling.logprobs
    if k is None:
        return ()
    near = range(-num_likelier, k - num_likelier)
    return tuple(TokenLogprob(t, -t / 100, tuple((t + i, -(t + i) / 100) for i in near)) for t in tokens)


def front_door(
    source: Echo,
    limits: RequestLimits | None = None,
    template: str = TEMPLATE,
    levels: ServiceLevels | None = None,
) -> FrontDoor:
    return FrontDoor(source, byte_tokenizer(template), limits, levels)


@dataclass(frozen=True, slots=True)
class Served:
    source: Echo
    http_port: int
    grpc_port: int
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def open_gate(self) -> None:
        self.loop.call_soon_threadsafe(self.source.gate.set)


@contextmanager
def served(
    source: Echo,
    *,
    api_key: str | None = None,
    access: AccessPolicy | None = None,
    limits: RequestLimits | None = None,
    tls: TlsConfig | None = None,
    template: str = TEMPLATE,
    tokenizer: DiptychTokenizer | None = None,
    connections: ConnectionLimits | None = None,
    levels: ServiceLevels | None = None,
    has_dashboard: bool = False,
    tracer: Tracer | None = None,
    kept: StoreLimits | None = None,
) -> Generator[Served]:
    """The HTTP and the gRPC server on real sockets, on an event loop of their own. `tokenizer`: None: of bytes, with
    `template`. `has_dashboard`: of a router without workers."""
    ready = threading.Event()
    found: list[Served] = []
    stop = asyncio.Event()

    async def main() -> None:
        policy = access or AccessPolicy(KeyRing(api_key))
        needs_key = not policy.keys.is_open
        door = FrontDoor(source, tokenizer or byte_tokenizer(template), limits, levels, needs_key=needs_key)
        grpc_server = InferenceServer(door, policy.keys, tls=tls, limits=connections, tracer=tracer)
        grpc_port = await grpc_server.start("127.0.0.1", 0)
        sock = bind("127.0.0.1", 0)
        found.append(Served(source, sock.getsockname()[1], grpc_port, asyncio.get_running_loop()))
        ready.set()
        metrics = HttpMetrics((KeyMetrics(policy.keys),))
        routing = RoutingConfig()
        snapshots = Snapshots(Router(routing), routing.level, RouterIdentity.here()) if has_dashboard else None
        app = make_app(door, policy, metrics, kept, tracer, snapshots)
        await serve_http(app, sock, stop, grace_s=1, tls=tls, limits=connections, metrics=metrics)
        await grpc_server.stop(0)
        await door.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    try:
        yield found[0]
    finally:
        found[0].loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        assert not thread.is_alive()
