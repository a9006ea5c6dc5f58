"""Process that renders chat templates and encodes texts for a router.

    the tokenizer's state -> ready, or an error -> task -> token ids, or an error -> task ...

A template is a program with input from strangers: it may take any time and memory. That ends this process, not the
router: processor time of a task (ITIMER_PROF) and memory of the process (RLIMIT_DATA) are limited.

The end of the socket ends the process, as does its parent's end. Imports no Ray, no torch.

    python -m diptych.cluster.front.prompts.prompt_process  (standard input: a socket; prompt_encoder.py starts it)
"""

import json
import logging
import signal
import socket
from array import array
from collections.abc import Sequence
from typing import BinaryIO

from ....workers.common.errors import DiptychError, InternalError, InvalidRequest
from ...tokens.prompt_encoding import ChatPrompt, Encoded, encode_chat, encode_text
from ...tokens.prompt_frames import (
    BODY,
    CHAT,
    TEXT,
    Frame,
    Head,
    bound_memory,
    of_error,
    read_frame,
    run_process,
    send_frame,
    to_frame,
)
from ...tokens.tokenizer import Tokenizer

log = logging.getLogger("diptych.prompts")


def serve(stream: BinaryIO, sock: socket.socket) -> None:
    """Answer task after task until the stream ends."""
    head, state = read_frame(stream) or ({}, b"")
    tokenizer = Tokenizer.from_state(state)
    del state
    bound_memory(head["max_memory_bytes"])
    signal.setitimer(signal.ITIMER_PROF, head["cpu_s"])
    send_frame(sock, _begin(tokenizer))
    while (frame := read_frame(stream)) is not None:
        task, body = frame
        signal.setitimer(signal.ITIMER_PROF, task["cpu_s"])
        send_frame(sock, _reply(tokenizer, task, body))
        del frame, body


def _begin(tokenizer: Tokenizer) -> Frame:
    try:
        tokenizer.compile_template()
    except DiptychError as e:
        return of_error(e)
    return to_frame({})


def _reply(tokenizer: Tokenizer, task: Head, body: bytes) -> Frame:
    try:
        return _compute(tokenizer, task, body)
    except DiptychError as e:
        error = e
    except MemoryError:
        error = InvalidRequest("the prompt needs more memory to read than this server allows: send less")
    except Exception:
        # Top loop of the process: a bug in one task does not end the next one.
        log.exception("a prompt was not read")
        error = InternalError("the prompt could not be read: please report this")
    return of_error(error)


def _compute(tokenizer: Tokenizer, task: Head, body: bytes) -> Frame:
    most = task["max_context_tokens"]
    kind = task["kind"]
    if kind == CHAT:
        return _of_prompts([Encoded(encode_chat(tokenizer, ChatPrompt(**json.loads(body)), most))])
    if kind == TEXT:
        return _of_prompts([Encoded(encode_text(tokenizer, body.decode(), most, special=task["special"]))])
    assert kind == BODY
    # Imported late: it takes four times as long as all other imports, and a process for chats needs none of it.
    from .calls import read_call

    call, prompts = read_call(tokenizer, task["body"], body, most, task["max_prompts"])
    return _of_prompts(prompts, call)


def _of_prompts(prompts: Sequence[Encoded], call: bytes = b"") -> Frame:
    """Answer of a call. Body: the call, then token ids (uint32) and text of each prompt."""
    parts = [call]
    sizes: list[tuple[int, int]] = []
    for prompt in prompts:
        ids, text = array("I", prompt.token_ids).tobytes(), (prompt.text or "").encode()
        sizes.append((len(ids), -1 if prompt.text is None else len(text)))
        parts += (ids, text)
    return to_frame({"call": len(call), "prompts": sizes}, b"".join(parts))


def main() -> None:
    run_process(serve)


if __name__ == "__main__":
    main()
