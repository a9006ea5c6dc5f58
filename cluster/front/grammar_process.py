"""Process that checks grammars of requests for a router.

    limits -> ready -> grammar -> nothing, or an error -> grammar ...

A grammar is a program from strangers: to compile it may take any time and memory, or overflow the stack. That ends this
process, not the router (see task_process.py). Imports no Ray, no torch.

    python -m diptych.cluster.front.grammar_process  (standard input: a socket; grammar_checker.py starts it)
"""

import logging
import signal
import socket
from typing import BinaryIO

from ...workers.common.errors import DiptychError, InternalError, InvalidGrammar
from ...workers.common.request import Grammar, GrammarKind
from ...workers.grammar.check import GrammarCheck
from ..tokens.prompt_frames import Frame, Head, bound_memory, of_error, read_frame, run_process, send_frame, to_frame

log = logging.getLogger("diptych.grammars")


def serve(stream: BinaryIO, sock: socket.socket) -> None:
    """Answer task after task until the stream ends."""
    head, _ = read_frame(stream) or ({"max_memory_bytes": 0}, b"")
    checks = GrammarCheck()
    bound_memory(head["max_memory_bytes"])
    send_frame(sock, to_frame({}))
    while (frame := read_frame(stream)) is not None:
        task, text = frame
        signal.setitimer(signal.ITIMER_PROF, task["cpu_s"])
        send_frame(sock, _reply(checks, task, text.decode(errors="replace")))


def _reply(checks: GrammarCheck, task: Head, text: str) -> Frame:
    error: DiptychError
    try:
        checks.check(Grammar(GrammarKind(task["kind"]), text))
        return to_frame({})
    except DiptychError as e:
        error = e
    except MemoryError:
        error = InvalidGrammar("the grammar needs more memory than this server allows", param="grammar")
    except Exception:
        # Top loop of the process: a bug in one task does not end the next one.
        log.exception("a grammar was not checked")
        error = InternalError("the grammar could not be checked: please report this")
    return of_error(error)


if __name__ == "__main__":
    run_process(serve)
