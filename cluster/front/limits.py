"""Limits of one call, of what is held for all calls, and of connections to each of a router's two ports."""

from dataclasses import dataclass, field

from ...workers.common.errors import InvalidRequest
from ...workers.common.request import Request
from ..tokens.task_process import ProcessLimits
from .grammar_checker import LIMITS as GRAMMAR_LIMITS

MAX_PROMPT_LOGPROBS = 1 << 17  # values, over the choices of a call


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int = 4096
    max_connections_per_address: int = 2048  # of HTTP only: gRPC's library does not count them
    max_header_bytes: int = 16 << 10
    header_timeout_s: float = 10.0  # for the TLS handshake, and again for the head of a request
    idle_timeout_s: float = 75.0  # without a request; longer than clients keep connections, so that they close first
    send_timeout_s: float = 30.0  # in which a client must read some of the data that waits for it


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one call, and of the bodies and answers that are held for all calls."""

    max_sequences: int = 128  # completions, over all prompts of a call
    max_inputs: int = 2048  # of a call for embeddings, of which max_sequences run at a time
    max_answer_floats: int = 1 << 22  # numbers of all embeddings of a call
    max_gathered_floats: int = 1 << 25  # in all answers with embeddings that are being collected
    max_stop_strings: int = 16
    max_stop_chars: int = 1024  # characters of one stop string
    max_timeout_s: float = 600.0  # also the default of a call without a time-out
    max_body_bytes: int = 16 << 20
    max_message_bytes: int = 2 << 20  # of gRPC: the event loop reads such a message in 25 ms at most
    max_held_body_bytes: int = 128 << 20  # of all bodies that are being read, beyond the first 64 KiB of each
    max_answer_logprobs: int = 1 << 18  # in an answer that is not streamed
    max_gathered_logprobs: int = 1 << 21  # in all answers that are being collected
    strict: bool = False  # refuse unknown fields
    process: ProcessLimits = field(default_factory=ProcessLimits)  # of the process that encodes prompts
    grammars: ProcessLimits = GRAMMAR_LIMITS  # of the process that checks grammars
    body_timeout_s: float = 60.0


def num_prompt_logprobs(request: Request) -> int:
    """Number of log-probabilities of the request's prompt that it asks for."""
    num_top = request.sampling.prompt_logprobs
    return 0 if num_top is None else len(request.prompt_token_ids) * (num_top + 1)


def check_prompt_logprobs(num: int) -> None:
    """Raise InvalidRequest for more than a call may have, over all its prompts."""
    if num > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"the prompts' log-probabilities are {num} numbers or more (tokens x (alternatives + 1) x n), at most "
            f"{MAX_PROMPT_LOGPROBS} in a call: ask for fewer alternatives, lower n, or send several calls",
            param="prompt_logprobs",
        )
