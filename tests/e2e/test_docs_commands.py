"""The commands of the documentation's pages, run as they are written there (tests/docs_commands.yaml)."""

from pathlib import Path

import pytest

from ..support.page_session import can_be_isolated, plan, run
from ..support.pages import all_blocks

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]
SESSIONS = [pytest.param(name, marks=[pytest.mark.long] if name in plan().long else []) for name in plan().sessions]


@pytest.mark.parametrize("name", SESSIONS)
def test_commands_do_what_their_page_says(name: str, tmp_path: Path) -> None:
    if not can_be_isolated():
        pytest.skip("the pages' ports are free only in a network of its own, which this user cannot make here")
    output = run(name, tmp_path)
    sections = plan().sessions[name]
    for block in all_blocks():
        assert (f"== {block.page}:{block.line}\n" in output) == (block.section in sections)
