"""From what a client asked for to a running Generation: the one path behind HTTP and gRPC.

    spec -> model, counts and time-out checked -> admitted or refused (429) -> tokenised once -> Requests -> Generation

Here a request gets its seed, its deadline and the ids of its completions; what is received is bounded before it costs.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ...workers.common.errors import DeadlineExceeded, InvalidRequest, UnknownModel
from ...workers.common.request import Request, SamplingParams
from ...workers.core.runner import ModelInfo
from ..routing.token_source import TokenSource
from ..tokens.prompt_encoder import MAX_INLINE_CHARS, ProcessLimits, PromptEncoder
from ..tokens.prompt_encoding import ChatPrompt, Encoded, Prompt, encode_text
from ..tokens.stop_strings import StopStrings, StopTable
from ..tokens.tokenizer import Tokenizer
from .generation import MIN_LARGE_SIZE, Generation
from .text_completion import TextCompletion

MAX_PROMPT_LOGPROBS = 1 << 17  # numbers, over the choices of a call
_MASK = (1 << 64) - 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one call, and of the bodies and answers that are held for all calls."""

    max_sequences: int = 128  # completions, over all its prompts
    max_stop_strings: int = 16
    max_stop_chars: int = 1024  # of one stop string
    max_timeout_s: float = 600.0  # also the time-out of a call that names none
    max_body_bytes: int = 16 << 20
    max_message_bytes: int = 2 << 20  # of gRPC, whose messages the event loop reads: some 25 ms at most
    max_held_body_bytes: int = 128 << 20  # of all bodies that are being read, beyond the first 64 KiB of each
    max_answer_logprobs: int = 1 << 18  # in an answer that is sent in one piece
    max_gathered_logprobs: int = 1 << 21  # in all such answers that are being gathered
    strict: bool = False  # refuse fields that nobody knows
    process: ProcessLimits = field(default_factory=ProcessLimits)  # of what encodes prompts
    body_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """What a client asked for. None: not given."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams  # its seed and max_tokens are not read: the fields below stand for them
    n: int = 1  # completions of each prompt
    stop: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    default_max_tokens: int | None = None  # where max_tokens is None; None: what the context still holds
    timeout_s: float | None = None
    model: str | None = None
    cache_salt: str = ""  # prefix-cache namespace: other salts never share blocks
    waited_s: float = 0.0  # of the time-out: until its prompts were read
    prompt_only: bool = False  # no token is wanted, whatever max_tokens: what is asked for is of the prompts


class TimeLeft:
    """Seconds of a call's time-out that are left."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def check(self) -> float:
        """Raises DeadlineExceeded where there are none."""
        if self._seconds <= 0:
            raise _unread()
        return self._seconds

    async def spend(self, work: Awaitable[T]) -> T:
        """What `work` gives. Raises DeadlineExceeded where it takes more than is left."""
        loop = asyncio.get_running_loop()
        began, deadline = loop.time(), asyncio.timeout(self._seconds)
        try:
            async with deadline:
                return await work
        except TimeoutError as e:
            if not deadline.expired():
                raise
            raise _unread() from e
        finally:
            self._seconds -= loop.time() - began


class FrontDoor:
    def __init__(self, source: TokenSource, tokenizer: Tokenizer, limits: RequestLimits | None = None) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.limits = limits or RequestLimits()
        self.encoder = PromptEncoder(tokenizer, self.limits.process)

    async def open(self) -> None:
        """Start what the first call would wait for."""
        await self.encoder.start()

    async def close(self) -> None:
        """End the processes that it started. Idempotent."""
        await self.encoder.close()

    def model(self, name: str | None = None) -> ModelInfo:
        """The served model. Raises UnknownModel where `name` is another, Unavailable before a worker is known."""
        info = self.source.model()
        if name is not None and name != info.name:
            raise UnknownModel(f"the model {name[:200]!r} is not served here: ask for {info.name!r}", param="model")
        return info

    async def start(self, spec: GenerationSpec, request_id: str) -> Generation:
        """Nothing runs before the generation's `batches` is read. Raises InvalidRequest, Overloaded, Unavailable,
        DeadlineExceeded."""
        info = self.model(spec.model)
        self._check_counts(spec)
        self.source.admit(len(spec.prompts) * spec.n)
        asked_s = self.limits.max_timeout_s if spec.timeout_s is None else spec.timeout_s
        prompts, left_s = await self._encode_all(spec.prompts, info, TimeLeft(asked_s - spec.waited_s))
        if left_s < asked_s:
            spec = replace(spec, timeout_s=left_s)
        stops = StopTable(spec.stop)
        completions: list[TextCompletion] = []
        num_logprobs = 0  # of prompts
        for token_ids in prompts:
            # A seed that we draw is drawn for each prompt, so that a prompt sent twice is answered twice.
            seed = secrets.randbits(64) if spec.seed is None else spec.seed & _MASK
            group = f"{request_id}-{len(completions)}" if spec.n > 1 else ""
            for i in range(spec.n):
                index = len(completions)
                request = self._request(spec, f"{request_id}-{index}", token_ids, choice_seed(seed, i), info, group)
                if i == 0:
                    request.validate(info.vocab_size, info.max_context_tokens)
                    num_logprobs += _num_prompt_logprobs(request) * spec.n
                    _check_prompt_logprobs(num_logprobs)
                elif request.sampling.prompt_logprobs is not None:  # the first one's are its siblings', too
                    request = replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
                detokenizer = self.tokenizer.detokenizer(token_ids)
                completion = TextCompletion(
                    index, request, detokenizer, StopStrings(stops), prompt_only=spec.prompt_only
                )
                completions.append(completion)
            if completions[-1].request.size >= MIN_LARGE_SIZE:
                await asyncio.sleep(0)  # for others: to check it took a while
        return Generation(self.source, request_id, completions, spec.n, asked_s)

    def _check_counts(self, spec: GenerationSpec) -> None:
        limits = self.limits
        if not 1 <= spec.n <= limits.max_sequences:
            raise InvalidRequest(f"n must be in [1, {limits.max_sequences}], got {spec.n}", param="n")
        if not spec.prompts:
            raise InvalidRequest("the prompt is empty: send at least one", param="prompt")
        if (num := len(spec.prompts) * spec.n) > limits.max_sequences:
            raise InvalidRequest(
                f"{len(spec.prompts)} prompts of n={spec.n} ask for {num} completions; a call may ask for "
                f"{limits.max_sequences}: send several calls",
                param="prompt" if spec.n == 1 else "n",
            )
        if len(spec.stop) > limits.max_stop_strings:
            raise InvalidRequest(f"at most {limits.max_stop_strings} stop strings, got {len(spec.stop)}", param="stop")
        if not all(0 < len(stop) <= limits.max_stop_chars for stop in spec.stop):
            raise InvalidRequest(f"a stop string has 1 to {limits.max_stop_chars} characters", param="stop")
        if spec.timeout_s is not None and not 0 < spec.timeout_s <= limits.max_timeout_s:
            raise InvalidRequest(
                f"timeout_s must be in (0, {limits.max_timeout_s:g}], got {spec.timeout_s}", param="timeout_s"
            )

    async def _encode_all(
        self, prompts: Sequence[Prompt], info: ModelInfo, left: "TimeLeft"
    ) -> tuple[list[tuple[int, ...]], float]:
        """Their token ids, and the seconds that are left. Raises DeadlineExceeded."""
        found: list[tuple[int, ...]] = []
        for prompt in prompts:
            found.append(await self._encode(prompt, info, left))
            if len(found[-1]) >= MIN_LARGE_SIZE:
                await asyncio.sleep(0)  # for others: to encode it took a while
        return found, left.check()

    async def _encode(self, prompt: Prompt, info: ModelInfo, left: "TimeLeft") -> tuple[int, ...]:
        """What is encoded in a process may wait for it, which counts."""
        most = info.max_context_tokens
        match prompt:
            case tuple():
                return prompt
            case Encoded():
                return prompt.token_ids
            case ChatPrompt():
                return await left.spend(self.encoder.encode_chat(prompt, most))
            case str() if len(prompt) <= MAX_INLINE_CHARS:
                return encode_text(self.tokenizer, prompt, most)
            case str():
                return await left.spend(self.encoder.encode_text(prompt, most))

    def _request(
        self,
        spec: GenerationSpec,
        request_id: str,
        token_ids: tuple[int, ...],
        seed: int,
        info: ModelInfo,
        group: str,
    ) -> Request:
        room = max(1, info.max_context_tokens - len(token_ids))
        default = room if spec.default_max_tokens is None else min(room, spec.default_max_tokens)
        max_tokens = default if spec.max_tokens is None else spec.max_tokens
        if spec.prompt_only:
            max_tokens = 1  # what a worker makes at least
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling=replace(spec.sampling, seed=seed, max_tokens=max_tokens),
            timeout_s=self.limits.max_timeout_s if spec.timeout_s is None else spec.timeout_s,
            cache_salt=spec.cache_salt.encode(),
            group=group,
        )


def _unread() -> DeadlineExceeded:
    return DeadlineExceeded(
        "the prompt was not read before the request's time was over: send less, or ask for a longer timeout_s"
    )


def _num_prompt_logprobs(request: Request) -> int:
    num_top = request.sampling.prompt_logprobs
    return 0 if num_top is None else len(request.prompt_token_ids) * (num_top + 1)


def _check_prompt_logprobs(num: int) -> None:
    if num > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"the prompts' log-probabilities are {num} numbers or more (tokens x alternatives and 1 x n), at most "
            f"{MAX_PROMPT_LOGPROBS} in a call: ask for fewer alternatives, lower n, or send several calls",
            param="prompt_logprobs",
        )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a call's completion `choice`: the call's own for the first, then SplitMix64's output (Steele, Lea and
    Flood 2014) after `choice` steps from it. uint64."""
    if choice == 0:
        return seed
    z = (seed + choice * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
