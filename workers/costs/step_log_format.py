"""Format of a step log, which workers write (workers/engine/step_log.py) and `diptych profile` reads: a line of JSON,
then CSV. `began` is on the machine's monotonic clock, which its workers share."""

from dataclasses import dataclass

COLUMNS = ("began", "num_decodes", "num_context", "num_prefill", "num_pairs", "seconds")


@dataclass(frozen=True, slots=True)
class StepLogHeader:
    """Description of the worker whose steps a log holds."""

    model: str
    dtype: str
    device: str
    role: str  # at start
    threads: int  # of a worker; 0: not bound
    tensor_parallel: int
    block_size: int  # tokens
    num_blocks: int
    kv_token_bytes: float
    machine: str  # its processor
    cores: int  # of the machine
