"""Errors of the model of a step's time, on steps that a worker has logged.

    python -m benchmarks.simulator.step_fit FOLDER

FOLDER: of step logs (`diptych serve --step-log FOLDER`). For each log the model is fitted as for `diptych profile`,
with the prompts that a step hides (workers/costs/step_cost.py) and without, and is compared with the steps by the
number of their prompt tokens: median of predicted / measured, less 1. The first SKIPPED steps of a log are left out.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from diptych.cluster.simulate.profile import read_log
from diptych.cluster.simulate.timing import fit_weights, seconds_of

SKIPPED = 50
LEAST_STEPS = 5  # of a row
BOUNDS = (0, 1, 33, 81, 201, 1 << 30)  # prompt tokens
Steps = npt.NDArray[np.float64]


def errors(steps: Steps, *, hides: bool) -> tuple[float, Steps]:
    """Hidden seconds, and predicted / measured - 1 of each step. `steps` [n, 5]: as of fit_weights."""
    weights = np.array(fit_weights(steps, hides=hides))
    return float(weights[-1]), seconds_of(steps, weights) / steps[:, 4] - 1


def rows(name: str, steps: Steps) -> Iterator[str]:
    """Lines of a table of one log."""
    _, plain = errors(steps, hides=False)
    hidden_s, found = errors(steps, hides=True)
    for low, high in pairwise(BOUNDS):
        chosen = (steps[:, 2] >= low) & (steps[:, 2] < high)
        if chosen.sum() < LEAST_STEPS:
            continue
        tokens = "0" if high == 1 else f"{low} to {high - 1}" if high < BOUNDS[-1] else f"{low} and more"
        times = f"{chosen.sum()} | {1000 * steps[chosen, 4].mean():.1f}"
        means = " | ".join(f"{np.median(each[chosen]):+.0%}" for each in (plain, found))
        yield f"| {name} | {hidden_s * 1000:.1f} | {tokens} | {times} | {means} |"


def main(texts: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of step logs")
    args = parser.parse_args(texts)
    print("| worker | hidden, ms | prompt tokens of a step | steps | ms | error without | with hidden prompts |")
    print("|---|--:|---|--:|--:|--:|--:|")
    for path in sorted(args.folder.glob("*.csv")):
        header, steps = read_log(path)
        kept = steps[SKIPPED:, 1:]
        if len(kept) > SKIPPED:
            print("\n".join(rows(f"{header.threads} threads", kept)))


if __name__ == "__main__":
    main()
