"""Some seeds of random_clusters.py, which has the rest; and that it finds what is different."""

from dataclasses import replace
from pathlib import Path

import pytest

from .random_clusters import Drawn, differences, run

pytestmark = pytest.mark.e2e

# They draw: two ranks; KIVI on a fake device, with little memory; KV in fp8 where torch computes; KIVI by compiled
# kernels. In all of them a worker is killed.
SEEDS = (1, 2, 32, 37)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("seed", SEEDS)
def test_answers_are_those_of_one_worker_that_is_asked_one_call_at_a_time(seed: int, tmp_path: Path) -> None:
    assert run(seed, tmp_path) == []


def test_what_is_different_is_found() -> None:
    drawn = replace(Drawn.of(1, num_calls=3), is_full_width=True)
    choices = [{"token_ids": [5, i], "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5]}} for i in range(3)]
    right = [[3, 2, [choice]] for choice in choices]
    assert list(differences(drawn, right, right, is_exact=True)) == []
    failed = '{"error": {"type": "server_error"}}'
    rounded = [3, 2, [choices[0] | {"logprobs": {"token_logprobs": [-0.5000001]}}]]
    other = [3, 2, [choices[0] | {"token_ids": [5, 7]}]]
    for found, expected, of_exact, of_near in (
        (failed, failed, 1, 1),
        (failed, right[0], 1, 1),
        (rounded, right[0], 1, 0),
        (other, right[0], 1, 1),
    ):
        for is_exact, num in ((True, of_exact), (False, of_near)):
            different = differences(drawn, [found, *right[1:]], [expected, *right[1:]], is_exact=is_exact)
            assert len(list(different)) == num
