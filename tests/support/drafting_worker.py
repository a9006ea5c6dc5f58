"""A worker process in which drafts of a model always pay, however small the model: for tests of what becomes of them.

python -m tests.support.drafting_worker FLAGS, from the repository's root; the flags are those of a worker.
"""

import sys

from diptych.workers.core.draft import ModelProposer
from diptych.workers.server import service, worker

from .drafters import FreeRows


def make_free_speculator(method: str, max_tokens: int, min_accept: float, model: ModelProposer | None) -> FreeRows:
    assert model is not None
    return FreeRows(method, model, max_tokens, min_accept)


def main() -> int:
    service.make_speculator = make_free_speculator
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
