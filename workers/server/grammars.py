"""Compiles the grammars of submitted requests on threads, one task for each. One event loop.

A request whose grammar is compiled already is submitted at once; any other one waits here, and no one else does.
"""

import asyncio
from collections.abc import Callable

from ..common.errors import InvalidGrammar
from ..common.request import Grammar
from ..grammar.compiler import CompiledGrammar, GrammarCompiler

Then = Callable[[CompiledGrammar | InvalidGrammar], object]


class Grammars:
    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._tasks: set[asyncio.Task[None]] = set()

    def compiled(self, grammar: Grammar, then: Then) -> None:
        """Call `then` with the compiled grammar, or with why there is none; later, where it must be compiled."""
        found = self._compiler.cached(grammar)
        if found is not None:
            then(found)
            return
        task = asyncio.create_task(self._compile(grammar, then))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Drop the requests that wait."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _compile(self, grammar: Grammar, then: Then) -> None:
        try:
            found = await asyncio.to_thread(self._compiler.compile, grammar)
        except InvalidGrammar as e:
            then(e)
        else:
            then(found)
