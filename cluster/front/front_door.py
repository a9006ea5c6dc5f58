"""Turns a client's request into a running Generation: the path that HTTP and gRPC share.

    spec -> model, counts and time-out checked -> admitted or refused (429) -> tokenised once -> Requests -> Generation

Here a request gets its seed, its deadline and the ids of its completions. Sizes are checked before work is done.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...workers.common.errors import EmbeddingsNotServed, InvalidRequest, UnknownModel
from ...workers.common.request import Request, RequestLevel, SamplingParams
from ...workers.core.runner import ModelInfo
from ..common.quota import Quota
from ..dialects.dialect import Dialect, find_dialect
from ..dialects.tools import ToolUse
from ..routing.token_source import TokenSource, TokenStreams
from ..telemetry.call_trace import CallTrace
from ..tokens.prompt_encoder import MAX_INLINE_CHARS, PromptEncoder
from ..tokens.prompt_encoding import ChatPrompt, Encoded, Prompt, Truncation, WrittenChat, encode_text
from ..tokens.stop_strings import StopStrings, StopTable
from ..tokens.tokenizer import Tokenizer
from .access.accounts import Call
from .answer_plan import AnswerPlan, AskedBudget, check_tools, plan_answer, thought_budget, thought_state
from .beams.source import AskedBeams, BeamSource
from .choice_seed import UINT64, choice_seed
from .embedding_run import EmbeddingRun, check_inputs
from .generation import MIN_LARGE_SIZE, Generation
from .grammar_checker import GrammarChecker
from .levels import NO_LEVEL, AskedLevel, ServiceLevels, bound
from .limits import RequestLimits, check_prompt_logprobs, num_prompt_logprobs
from .readiness import Readiness
from .retries.answer_key import AnswerKey
from .text_completion import TextCompletion
from .time_left import TimeLeft

MAX_NAMED_MODELS = 8  # in an error


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """Request of a client. None: not given."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams  # its seed and max_tokens are not used: see the fields below
    n: int = 1  # completions of each prompt
    stop: tuple[str, ...] = ()
    shows_stop: bool = False  # the stop string or stop token that ends an answer is a part of its text
    shows_special: bool = False  # so are special tokens
    seed: int | None = None
    max_tokens: int | None = None
    default_max_tokens: int | None = None  # where max_tokens is None; None: the rest of the context
    timeout_s: float | None = None
    model: str | None = None
    cache_salt: str = ""  # namespace of the prefix cache, among those of its account
    waited_s: float = 0.0  # part of the time-out that passed until its prompts were read
    level: AskedLevel = NO_LEVEL
    beams: AskedBeams | None = None  # the n most likely answers are searched for; None: answers are sampled
    prompt_only: bool = False  # only log-probabilities of the prompts are wanted, no token
    tools: ToolUse | None = None  # of a chat, whose answers are parsed; None: they are text
    thought: AskedBudget | None = None
    speculates: bool = True  # drafts may be verified for it
    prediction: str | tuple[int, ...] | Encoded | None = None  # what the answers are expected to be like
    sparse_attention: bool | None = None  # long contexts may be decoded in part; None: as workers are set
    special: bool = True  # a prompt that is a text gets the tokens of the tokenizer's post-processor
    truncation: Truncation | None = None  # of prompts; None: those that are too long are refused
    continues: str | None = None  # text of a chat's last message, which the answer goes on with
    key: AnswerKey | None = None  # by which the client may ask for the same answer again

    @property
    def num_reserved(self) -> int:
        """Number of tokens of the context that a prompt which is cut leaves to its answer."""
        asked = self.default_max_tokens if self.max_tokens is None else self.max_tokens
        return max(1, asked or 1)


class FrontDoor:
    """Entry of all requests, whichever protocol they came by."""

    def __init__(
        self,
        source: TokenSource,
        tokenizer: Tokenizer,
        limits: RequestLimits | None = None,
        levels: ServiceLevels | None = None,
        dialect: Dialect | None = None,
        *,
        needs_key: bool = False,
    ) -> None:
        """`dialect`: of the model; None: as its chat template shows. `needs_key`: every call is one of an API key."""
        self.source = source
        self.tokenizer = tokenizer
        self.dialect = find_dialect(tokenizer.template) if dialect is None else dialect
        self.limits = limits or RequestLimits()
        self.levels = levels or ServiceLevels()
        self.encoder = PromptEncoder(tokenizer, self.limits.process)
        self.embeddings = Quota(
            self.limits.max_gathered_floats, "the embeddings of other calls hold too many numbers: try later"
        )
        self._grammars = GrammarChecker(self.limits.grammars)
        self._needs_key = needs_key
        self.tag = secrets.token_hex(4)  # begins the ids of its calls: who chooses routers finds the one that is meant
        self.readiness = Readiness(source)

    async def open(self) -> None:
        """Start the process that encodes prompts, so that the first call does not wait for it."""
        await self.encoder.start()

    async def close(self) -> None:
        """End the processes that it started. Idempotent."""
        await self.encoder.close()
        await self._grammars.close()

    def model(self, name: str | None = None) -> ModelInfo:
        """Served model. Raises UnknownModel where `name` is none of its names, Unavailable before a worker is known."""
        info = self.source.model()
        if name is not None and name != info.name and name not in self.levels.models:
            known = " or ".join(map(repr, list(self._names(info))[:MAX_NAMED_MODELS]))
            raise UnknownModel(f"the model {name[:200]!r} is not served here: use {known}", param="model")
        return info

    def model_names(self) -> list[str]:
        """Names of the served model: the checkpoint's, then its aliases. Raises Unavailable."""
        return list(self._names(self.source.model()))

    def _names(self, info: ModelInfo) -> dict[str, None]:
        return {info.name: None} | dict.fromkeys(self.levels.models)

    async def start(
        self, spec: GenerationSpec, request_id: str, call: Call | None = None, trace: CallTrace | None = None
    ) -> Generation:
        """Check, admit and tokenise a request. Nothing runs before `batches` of the generation is read.
        `call`: on its API key's account; None: no key is needed. `trace`: of the call; None: it has none. Raises
        InvalidRequest, Overloaded, Unavailable, DeadlineExceeded."""
        assert call or not self._needs_key  # whoever took the request forgot whose it is
        info = self.model(spec.model)
        self._check_counts(spec)
        level, tenant, salt = self._owned(spec, info, call)
        self.source.admit(len(spec.prompts) * spec.n)
        asked_s = self.limits.max_timeout_s if spec.timeout_s is None else spec.timeout_s
        left = TimeLeft(asked_s - spec.waited_s)
        if spec.tools is not None:
            check_tools(self.dialect, spec.tools)
        if (grammar := spec.sampling.grammar) is not None:
            await left.spend(self._grammars.check(grammar))
        prompts, _ = await self._encode_all(spec, info, left)
        prediction = await self._predicted(spec, left)
        plan = None
        if spec.tools is not None:
            plan, spec = await self._planned(spec, spec.tools, prompts[0], left)
        left_s = left.check()
        if spec.thought is not None:
            state = thought_state(self.dialect, self.tokenizer, prompts[0], spec.continues)
            budget = thought_budget(spec.thought, self.dialect, self.tokenizer, state)
            spec = replace(spec, sampling=replace(spec.sampling, thought=budget))
        whole = Request(
            request_id,
            (),
            spec.sampling,
            left_s,
            salt,
            level=level,
            tenant=tenant,
            speculates=spec.speculates,
            prediction=prediction,
            sparse_attention=spec.sparse_attention,
        )
        completions = await self._completions(spec, prompts, whole, info, plan, trace)
        source: TokenStreams = self.source
        if spec.beams is not None:
            source = BeamSource(source, spec.beams, [c.request for c in completions], spec.n, info)
        generation = Generation(source, request_id, completions, spec.n, asked_s, is_one_by_one=spec.key is not None)
        if trace is not None:
            first = completions[0].request
            trace.follow(generation, spec.model or info.name, first, request_id=request_id, n=spec.n)
        if call:
            call.admit(generation, len(completions) * (spec.max_tokens or spec.default_max_tokens or 0))
        return generation

    async def _completions(
        self,
        spec: GenerationSpec,
        prompts: Sequence[tuple[int, ...]],
        whole: Request,
        info: ModelInfo,
        plan: AnswerPlan | None,
        call: CallTrace | None,
    ) -> list[TextCompletion]:
        """Make the completions of all prompts. whole: what their requests have in common, and the beginning of their
        ids. Raises InvalidRequest."""
        stops = StopTable(spec.stop)
        completions: list[TextCompletion] = []
        num_logprobs = 0  # of the prompts
        for token_ids in prompts:
            # Each prompt gets a different random seed, so that a repeated prompt gets two answers.
            if spec.seed is not None:
                seed = spec.seed & UINT64
            else:
                seed = secrets.randbits(64) if spec.key is None else spec.key.seed(len(completions))
            group = f"{whole.request_id}-{len(completions)}" if spec.n > 1 else ""
            for i in range(spec.n):
                index = len(completions)
                sampling = _sampling(spec, len(token_ids), choice_seed(seed, i), info)
                own_id = f"{whole.request_id}-{index}"
                trace = call and call.journal(index)
                record = spec.key and spec.key.record(index)
                request = replace(
                    whole,
                    request_id=own_id,
                    prompt_token_ids=token_ids,
                    sampling=sampling,
                    group=group,
                    trace=trace,
                    record=record,
                )
                if i == 0:
                    request.validate(info.vocab_size, info.max_context_tokens)
                    num_logprobs += num_prompt_logprobs(request) * spec.n
                    check_prompt_logprobs(num_logprobs)
                elif request.sampling.prompt_logprobs is not None:  # the first completion's serve the whole prompt
                    request = replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
                text = TextCompletion(
                    index,
                    request,
                    self.tokenizer.detokenizer(
                        token_ids, special=spec.shows_special, shown=() if plan is None else plan.dialect.marks
                    ),
                    StopStrings(stops),
                    shows_stop=spec.shows_stop,
                    prompt_only=spec.prompt_only,
                    parser=None if plan is None else plan.parser(),
                )
                completions.append(text)
            if completions[-1].request.size >= MIN_LARGE_SIZE:
                await asyncio.sleep(0)  # let others run: the check took long
        return completions

    async def embed(
        self,
        spec: GenerationSpec,
        dimensions: int | None,
        request_id: str,
        call: Call | None = None,
        trace: CallTrace | None = None,
    ) -> EmbeddingRun:
        """Begin the embeddings of the prompts: nothing else that `spec` asks for is made. Raises what `start` raises,
        and EmbeddingsNotServed."""
        assert call or not self._needs_key
        info, limits = self.model(spec.model), self.limits
        if (embedding := info.embedding) is None:
            raise EmbeddingsNotServed("this model has no embeddings")
        embedding.check(dimensions)
        check_inputs(len(spec.prompts), dimensions or embedding.size, limits.max_inputs, limits.max_answer_floats)
        self._check_timeout(spec.timeout_s)
        level, tenant, salt = self._owned(spec, info, call)
        most_at_once = min(len(spec.prompts), limits.max_sequences)
        self.source.admit(most_at_once)
        asked_s = limits.max_timeout_s if spec.timeout_s is None else spec.timeout_s
        prompts, left_s = await self._encode_all(spec, info, TimeLeft(asked_s - spec.waited_s), embeds=True)
        whole = Request(request_id, (), spec.sampling, left_s, salt, embeds=True, level=level, tenant=tenant)
        requests = [
            replace(
                whole,
                request_id=f"{request_id}-{i}",
                prompt_token_ids=ids,
                trace=trace and trace.journal(i),
            )
            for i, ids in enumerate(prompts)
        ]
        for request in requests:
            request.validate(info.vocab_size, info.max_context_tokens)
            if request.size >= MIN_LARGE_SIZE:
                await asyncio.sleep(0)  # let others run: the check took long
        run = EmbeddingRun(self.source, embedding, requests, dimensions, asked_s=asked_s, most_at_once=most_at_once)
        if trace is not None:
            trace.follow(run, spec.model or info.name, requests[0], request_id=request_id)
        if call:
            call.admit(run, 0)
        return run

    async def encode(self, prompt: Prompt, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt of which nothing is generated. `special`: a text gets the tokens of the tokenizer's
        post-processor. Raises InvalidRequest, Overloaded, Unavailable, DeadlineExceeded."""
        return await self._encode(prompt, self.model(), TimeLeft(self.limits.max_timeout_s), special=special)

    async def _predicted(self, spec: GenerationSpec, left: TimeLeft) -> tuple[int, ...]:
        """Token ids of what the answers are expected to be like; none where that was not said."""
        match spec.prediction:
            case None:
                return ()
            case str() as text:
                return await left.spend(self.encoder.encode_prediction(text))
            case Encoded(token_ids):
                return token_ids
            case token_ids:
                return token_ids

    async def _planned(
        self, spec: GenerationSpec, tools: ToolUse, prompt: tuple[int, ...], left: TimeLeft
    ) -> tuple[AnswerPlan | None, GenerationSpec]:
        """Plan of the answers, and `spec` with the grammar that they follow."""
        given = spec.sampling.grammar
        state = thought_state(self.dialect, self.tokenizer, prompt, spec.continues)
        plan = plan_answer(self.dialect, tools, given, self.tokenizer, state, continues=spec.continues is not None)
        if plan is None or plan.grammar is None or plan.grammar is given:
            return plan, spec
        await left.spend(self._grammars.check(plan.grammar))
        return plan, replace(spec, sampling=replace(spec.sampling, grammar=plan.grammar))

    def _owned(self, spec: GenerationSpec, info: ModelInfo, call: Call | None) -> tuple[RequestLevel, bytes, bytes]:
        """Level, tenant and salt of the prefix cache of a call's requests."""
        asked = bound(spec.level, call.account.key.service_tier) if call else spec.level
        level = self.levels.of(spec.model or info.name, asked)
        tenant, salt = call.account.owner(spec.cache_salt) if call else (b"", spec.cache_salt.encode())
        return level, tenant, salt

    def _check_counts(self, spec: GenerationSpec) -> None:
        limits = self.limits
        if not 1 <= spec.n <= limits.max_sequences:
            raise InvalidRequest(f"n must be in [1, {limits.max_sequences}], got {spec.n}", param="n")
        if not spec.prompts:
            raise InvalidRequest("the prompt is empty: send at least one", param="prompt")
        if (num := len(spec.prompts) * spec.n) > limits.max_sequences:
            raise InvalidRequest(
                f"{len(spec.prompts)} prompts of n={spec.n} need {num} completions; a call may have at most "
                f"{limits.max_sequences}: send several calls",
                param="prompt" if spec.n == 1 else "n",
            )
        if len(spec.stop) > limits.max_stop_strings:
            raise InvalidRequest(f"at most {limits.max_stop_strings} stop strings, got {len(spec.stop)}", param="stop")
        if not all(0 < len(stop) <= limits.max_stop_chars for stop in spec.stop):
            raise InvalidRequest(f"a stop string has 1 to {limits.max_stop_chars} characters", param="stop")
        self._check_timeout(spec.timeout_s)

    def _check_timeout(self, timeout_s: float | None) -> None:
        most_s = self.limits.max_timeout_s
        if timeout_s is not None and not 0 < timeout_s <= most_s:
            raise InvalidRequest(f"timeout_s must be in (0, {most_s:g}], got {timeout_s}", param="timeout_s")

    async def _encode_all(
        self, spec: GenerationSpec, info: ModelInfo, left: TimeLeft, *, embeds: bool = False
    ) -> tuple[list[tuple[int, ...]], float]:
        """Token ids of each prompt, and the seconds that are left. Raises DeadlineExceeded."""
        found: list[tuple[int, ...]] = []
        for prompt in spec.prompts:
            token_ids = await self._encode(prompt, info, left, special=spec.special)
            if spec.truncation is not None:
                token_ids = spec.truncation.cut(
                    token_ids, info.max_context_tokens - (0 if embeds else spec.num_reserved)
                )
            found.append(token_ids)
            if len(found[-1]) >= MIN_LARGE_SIZE:
                await asyncio.sleep(0)  # let others run: the encoding took long
        return found, left.check()

    async def _encode(self, prompt: Prompt, info: ModelInfo, left: TimeLeft, *, special: bool) -> tuple[int, ...]:
        """Token ids of one prompt. The time that a prompt waits for the encoding process counts."""
        most = info.max_context_tokens
        match prompt:
            case tuple():
                return prompt
            case Encoded():
                return prompt.token_ids
            case ChatPrompt():
                return await left.spend(self.encoder.encode_chat(prompt, most))
            case WrittenChat():
                return await left.spend(self.encoder.encode_written(prompt, most))
            case str() if len(prompt) <= MAX_INLINE_CHARS:
                return encode_text(self.tokenizer, prompt, most, special=special)
            case str():
                return await left.spend(self.encoder.encode_text(prompt, most, special=special))


def _sampling(spec: GenerationSpec, num_prompt_tokens: int, seed: int, info: ModelInfo) -> SamplingParams:
    """Parameters of one completion."""
    room = max(1, info.max_context_tokens - num_prompt_tokens)
    default = room if spec.default_max_tokens is None else min(room, spec.default_max_tokens)
    max_tokens = default if spec.max_tokens is None else spec.max_tokens
    if spec.prompt_only:
        max_tokens = 1  # the least that a worker makes
    return spec.sampling.of_completion(seed, max_tokens)
