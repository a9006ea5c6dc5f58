"""Compiles grammars for a model's tokens, each once while it is in use.

The tokenizer is read before: about a second for a large vocabulary. Safe to use from several threads; compiling takes
milliseconds as a rule, so no event loop and no engine does it on its own thread.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from ..common.errors import InvalidGrammar
from ..common.request import Grammar, ThoughtBudget
from .large_stack import on_stack
from .limits import COMPILE_STACK_BYTES, LIMITS
from .matcher import Failed, Matcher
from .text import invalid, to_llguidance
from .tokens import added_token, read_tokenizer

MAX_CACHED = 64
TOKENIZER_FILE = "tokenizer.json"


class CompiledGrammar:
    """Matchers of several sequences share it."""

    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype

    def matcher(self, failed: Failed, budget: ThoughtBudget | None = None) -> Matcher:
        """Matcher of a sequence that has no token yet, or whose tokens it is about to be given."""
        return Matcher(self._prototype.deep_copy(), failed, budget)


class GrammarCompiler:
    def __init__(self, read_tokenizer: Callable[[], LLTokenizer]) -> None:
        """`read_tokenizer` raises InvalidGrammar where no grammar can be compiled for the model."""
        self._read_tokenizer = read_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._cache_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._cached: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    @classmethod
    def of_folder(cls, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "GrammarCompiler":
        """Compiler for a checkpoint, which need not exist until a grammar comes. Its tokenizer is read from now on, on
        a thread: the library holds Python's lock for half a second and more, which would stop running answers."""
        made = cls(lambda: _read(folder, vocab_size, eos_token_ids))
        if (folder / TOKENIZER_FILE).is_file():
            threading.Thread(target=made._read_early, name="diptych-grammars", daemon=True).start()
        return made

    def cached(self, grammar: Grammar) -> CompiledGrammar | None:
        """Return the grammar if it was compiled lately; it stays longest of all then."""
        with self._cache_lock:
            found = self._cached.get(grammar)
            if found is not None:
                self._cached.move_to_end(grammar)
        return found

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises InvalidGrammar."""
        if (found := self.cached(grammar)) is not None:
            return found
        found = on_stack(COMPILE_STACK_BYTES, lambda: self._compiled(grammar))
        with self._cache_lock:
            self._cached[grammar] = found
            self._cached.move_to_end(grammar)
            if len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        return found

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        tokenizer = self._tokens()
        text = to_llguidance(grammar, partial(added_token, tokenizer))
        prototype = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
        if prototype.is_error():
            raise invalid(grammar, prototype.get_error())
        return CompiledGrammar(prototype)

    def _tokens(self) -> LLTokenizer:
        with self._read_lock:
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer()
            return self._tokenizer

    def _read_early(self) -> None:
        with suppress(InvalidGrammar):  # the first grammar says why
            self._tokens()


def _read(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise InvalidGrammar(
            f"answers of this model cannot follow a grammar: its workers find no {TOKENIZER_FILE} in {folder}. Add one "
            "to the checkpoint",
            param="grammar",
        )
    try:
        return read_tokenizer(path, vocab_size, eos_token_ids)
    except Exception as e:  # the library raises no narrower class
        raise InvalidGrammar(
            f"answers of this model cannot follow a grammar: its {TOKENIZER_FILE} cannot be used ({e})",
            param="grammar",
        ) from e
