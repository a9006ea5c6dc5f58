"""Checks the grammars of requests at the door, in a process that is ended at a limit; each once while it is in use."""

from collections import OrderedDict

from ...workers.common.errors import InternalError, InvalidGrammar
from ...workers.common.request import Grammar
from ..tokens.prompt_frames import Head
from ..tokens.task_process import ProcessLimits, TaskProcess

MAX_CACHED_BYTES = 8 << 20  # of grammars that were found good or bad
_MODULE = "diptych.cluster.front.grammar_process"
# A grammar is answered for within 2 s: 1.5 s of these, the rest for the process that ends.
LIMITS = ProcessLimits(cpu_s=1.0, cpu_s_per_mib=0.0, wall_factor=1.5, max_wait_s=10.0, max_memory_bytes=512 << 20)


class GrammarChecker:
    """Use and `close` it on one event loop. The process starts with the first grammar."""

    def __init__(self, limits: ProcessLimits = LIMITS) -> None:
        self._process = _GrammarProcess(_MODULE, lambda: b"", limits)
        self._known: OrderedDict[Grammar, InvalidGrammar | None] = OrderedDict()
        self._num_bytes = 0

    async def close(self) -> None:
        await self._process.close()

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidGrammar, in the compiler's words; Overloaded."""
        grammar.validate()
        if grammar in self._known:
            self._known.move_to_end(grammar)
            error = self._known[grammar]
        else:
            error = await self._ask(grammar)
            self._remember(grammar, error)
        if error is not None:
            raise InvalidGrammar(error.message, param=grammar.field)

    async def _ask(self, grammar: Grammar) -> InvalidGrammar | None:
        try:
            await self._process.ask({"kind": grammar.kind.value}, grammar.text.encode(errors="replace"))
        except InvalidGrammar as e:
            return e
        return None

    def _remember(self, grammar: Grammar, error: InvalidGrammar | None) -> None:
        if grammar not in self._known:  # two requests may have asked at once
            self._known[grammar] = error
            self._num_bytes += _size(grammar)
        while self._num_bytes > MAX_CACHED_BYTES:
            oldest, _ = self._known.popitem(last=False)
            self._num_bytes -= _size(oldest)


class _GrammarProcess(TaskProcess):
    def exceeded(self, task: Head, cpu_s: float) -> InvalidGrammar:
        return InvalidGrammar(
            f"compiling the {task['kind']} needs more than {cpu_s:.3g} s of processor time or "
            f"{self.limits.max_memory_bytes >> 20} MiB, or more nesting than there is room for. Send a simpler one",
            param="grammar",
        )

    def not_started(self) -> InternalError:
        return InternalError("the process that checks grammars did not start: see the router's log")


def _size(grammar: Grammar) -> int:
    return 4 * len(grammar.text) + 1024
