"""Workers that start, serve and end together, because they share the experts of a mixture (`data_parallel`). Pure.

A gang is what a pool counts. Most are of one worker, which has the gang's id; the others' have a number each behind it:
"decode-3" is "decode-3.0", "decode-3.1", ...
"""


def members(gang_id: str, size: int) -> list[str]:
    """The ids of its workers, by rank."""
    return [gang_id] if size == 1 else [f"{gang_id}.{rank}" for rank in range(size)]


def gang_of(worker_id: str) -> str:
    return worker_id.partition(".")[0]


def rank_of(worker_id: str) -> int:
    return int(worker_id.partition(".")[2] or 0)
