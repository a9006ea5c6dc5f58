"""Every named error of the system.

    DiptychError                     code       who can mend it
    ├── InvalidRequest               400        the client
    │   ├── PromptTooLong            400
    │   ├── UnknownModel             404
    │   ├── UnknownResponse          404
    │   │   └── UnknownPreviousResponse 400
    │   ├── UnknownFile              404
    │   ├── NotServed                404
    │   ├── ThreadsNotServed         400
    │   ├── InvalidGrammar           400
    │   ├── EmbeddingsNotServed      400
    │   ├── AnswerTakenOver          409        nobody: another call goes on with the answer
    │   ├── BodyTooSlow              408
    │   ├── BodyTooLarge             413
    │   ├── UnsupportedEncoding      415
    │   └── IdempotencyKeyReused     422        the client (a new key)
    ├── Unauthenticated              401        the client
    ├── Overloaded                   429        time (retry_after_s)
    │   └── RateLimited              429        the same; the client (its API key used what it may)
    ├── RequestAborted               499        nobody: the client left
    ├── DeadlineExceeded             504        the client (a longer time-out) or the operator (more workers)
    ├── Unavailable                  503        time, or the operator
    │   ├── WorkerLost               503        the router (resumes elsewhere)
    │   │   ├── TlsMismatch          503        the operator (the same `tls` for all processes)
    │   │   └── RankLost             503        the supervisor (starts the worker again)
    │   │       ├── PeerLost         503        the same (whoever was lost first says why)
    │   │       └── DeviceLost       503        the same; the operator (a GPU that fails again)
    │   ├── WorkerDraining           503        the router (submits elsewhere)
    │   ├── PromptReturned           503        the router (submits elsewhere)
    │   ├── OutOfBlocks              503        the router (submits elsewhere), the operator (more memory)
    │   ├── OutOfDeviceMemory        503        the same (more memory beside the KV cache)
    │   └── StepFailed               503        the router (submits elsewhere; computed alone there at first)
    │       └── StepFailedAlone      503        the same; a second one in a row ends the request
    ├── RequestFailsSteps            500        us (its steps failed on several workers; their logs have the tracebacks)
    ├── HandoffError                 500        the router (prefills again)
    │   ├── UnknownHandoff           500
    │   ├── LeaseLost                500
    │   ├── SequenceEnded            500        nobody: it finished, or was aborted, where it ran
    │   ├── LayoutMismatch           500        the operator (the pools' settings)
    │   └── TransportError           500
    │       └── ChecksumMismatch     500        the router; the operator (a link or memory that corrupts)
    ├── ConfigError                  (start)    the operator
    │   ├── InsufficientMemory       (start)
    │   └── PortInUse                (start)
    ├── CheckpointError              (start)    the operator
    │   └── UnsupportedArchitecture  (start)
    ├── WorkloadError                (bench)    whoever made the trace or the conversations
    └── InternalError                500        us

Each message says the cause and the remedy. `status` is the HTTP status at the front door; front/grpc/api.py maps it
to a gRPC status. `retryable` says whether the same request may succeed on another worker.
"""


class DiptychError(Exception):
    """Base of every error that a user can meet."""

    status: int = 500
    code: str = "internal_error"
    retryable: bool = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the invalid request field, if there is one


class InvalidRequest(DiptychError):
    status, code = 400, "invalid_request_error"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class UnknownModel(InvalidRequest):
    status, code = 404, "model_not_found"


class UnknownResponse(InvalidRequest):
    status, code = 404, "response_not_found"


class UnknownPreviousResponse(UnknownResponse):
    status, code = 400, "previous_response_not_found"


class UnknownFile(InvalidRequest):
    status, code = 404, "file_not_found"


class NotServed(InvalidRequest):
    """The call is one of an API that is served in part."""

    status, code = 404, "not_served"


class ThreadsNotServed(InvalidRequest):
    """The server was asked to hold a conversation of Anthropic's API."""

    code = "thread_unsupported_request"  # Anthropic's name: its client goes on without a thread


class InvalidGrammar(InvalidRequest):
    """The grammar of an answer cannot be compiled, costs too much, or cannot be followed to its end."""

    code = "invalid_grammar"


class EmbeddingsNotServed(InvalidRequest):
    """The model has no embeddings, or they are made in a way that is not computed here."""

    code = "embeddings_not_served"


class AnswerTakenOver(InvalidRequest):
    """Another call with the same idempotency key came while this one ran, and goes on with its answer."""

    status, code = 409, "answer_taken_over"


class IdempotencyKeyReused(InvalidRequest):
    status, code = 422, "idempotency_key_reused"


class BodyTooSlow(InvalidRequest):
    status = 408


class BodyTooLarge(InvalidRequest):
    status = 413


class UnsupportedEncoding(InvalidRequest):
    status = 415


class Unauthenticated(DiptychError):
    status, code = 401, "invalid_api_key"


class Overloaded(DiptychError):
    status, code = 429, "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, retry_helps: bool = True) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.retry_helps = retry_helps  # False: the same request is refused however low the load is


class RateLimited(Overloaded):
    """Refusal of a call beyond a limit of its API key."""

    def __init__(self, message: str, *, reason: str = "", retry_after_s: float = 1.0, retry_helps: bool = True) -> None:
        super().__init__(message, retry_after_s=retry_after_s, retry_helps=retry_helps)
        self.reason = reason  # requests, concurrency or tokens


class RequestAborted(DiptychError):
    status, code = 499, "request_aborted"


class DeadlineExceeded(DiptychError):
    status, code = 504, "deadline_exceeded"


class Unavailable(DiptychError):
    status, code, retryable = 503, "service_unavailable", True


class WorkerLost(Unavailable):
    code = "worker_lost"


class TlsMismatch(WorkerLost):
    """Two of our processes that cannot agree on TLS."""

    code = "tls_mismatch"


class RankLost(WorkerLost):
    code = "rank_lost"


class PeerLost(RankLost):
    """A process that this one depends on is gone: a consequence, not the cause."""

    code = "peer_lost"


class DeviceLost(RankLost):
    code = "device_lost"


class WorkerDraining(Unavailable):
    code = "worker_draining"


class PromptReturned(Unavailable):
    """The worker computes no prompts any more, and had not begun this one."""

    code = "prompt_returned"


class OutOfBlocks(Unavailable):
    code = "out_of_kv_blocks"


class OutOfDeviceMemory(Unavailable):
    """The device had no memory for a step. It was not computed; what is in the KV cache is valid."""

    code = "out_of_device_memory"


class StepFailed(Unavailable):
    """The step that computed the sequence raised. Any of its sequences may be the cause."""

    code = "step_failed"

    def __init__(self, message: str, *, num_output: int = 0) -> None:
        super().__init__(message)
        self.num_output = num_output  # tokens that the sequence had generated, and those that were drafted after them


class StepFailedAlone(StepFailed):
    """Step failure while no other sequence was in the step and the worker can compute: the sequence is the likely
    cause."""

    code = "step_failed_alone"


class RequestFailsSteps(DiptychError):
    """Steps raised with the request on several workers, the last with no other one in it: it is not tried again."""

    code = "request_fails_steps"


class HandoffError(DiptychError):
    code, retryable = "handoff_failed", True


class UnknownHandoff(HandoffError):
    code = "unknown_handoff"


class LeaseLost(HandoffError):
    code = "lease_lost"


class SequenceEnded(HandoffError):
    code = "sequence_ended"


class LayoutMismatch(HandoffError):
    code, retryable = "layout_mismatch", False


class TransportError(HandoffError):
    code = "transport_error"

    def __init__(self, message: str, *, may_still_land: bool = False) -> None:
        super().__init__(message)
        self.may_still_land = may_still_land  # bytes of the failed read may arrive later


class ChecksumMismatch(TransportError):
    code = "checksum_mismatch"


class ConfigError(DiptychError):
    code = "config_error"


class InsufficientMemory(ConfigError):
    """Error: the model or its KV does not fit in memory."""


class PortInUse(ConfigError):
    code = "port_in_use"


class CheckpointError(DiptychError):
    code = "checkpoint_error"


class UnsupportedArchitecture(CheckpointError):
    code = "unsupported_architecture"


class WorkloadError(DiptychError):
    code = "workload_error"


class InternalError(DiptychError):
    pass


def _tree(cls: type[DiptychError]) -> dict[str, type[DiptychError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found |= _tree(sub)
    return found


ERRORS = _tree(DiptychError)


def from_wire(name: str, message: str) -> DiptychError:
    """Make the error that a peer named. An unknown name becomes an InternalError."""
    cls = ERRORS.get(name)
    return cls(message) if cls is not None else InternalError(f"{name}: {message}")
