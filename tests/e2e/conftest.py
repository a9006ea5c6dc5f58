"""The cluster of test_clients.py, test_clients_by_libraries.py and test_cluster.py, which run in this order."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from diptych.kernels.cpu.load import library

from ..support.cluster_harness import Served, serving

# With the compiled kernels an answer depends only on its own tokens, in bfloat16 too.
DTYPE = "float32" if library() is None else "bfloat16"
SETTINGS = """
served_models: {chat: {ttft_s: 30}}
service_level: {tiers: {priority: {tpot_s: 0.5}}}
router: {tool_parser: hermes}  # the model's template shows no tools
log_format: json
dial: false  # the tests look at a prefill and a decode worker
"""


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Served]]:
    """Gives the one that runs; another after a test that ended it."""
    found: list[Served] = []
    with ExitStack() as stack:

        def get() -> Served:
            if not found or found[-1].process.poll() is not None:
                folder = tmp_path_factory.mktemp("served")
                (config := folder / "cluster.yaml").write_text(SETTINGS)
                flags = ("--config", str(config), "--prefill", "1", "--decode", "1", "--dtype", DTYPE)
                found.append(stack.enter_context(serving(folder / "home", *flags)))
            return found[-1]

        yield get
