"""Every command on a page of the documentation is run by a test or listed with the reason why not, and names only
commands, targets and flags that there are."""

import re
from pathlib import Path

import pytest

from .support.command_lines import simple_commands, wrong
from .support.page_session import plan, script
from .support.pages import FENCE, PAGES, ROOT, SHELLS, Block, all_blocks, plain

BLOCKS = all_blocks()
OF_SECTION = {block.section: [b for b in BLOCKS if b.section == block.section] for block in BLOCKS}
# A command in running text. It may leave out what it must be given: its name and its flags are looked at.
SPAN = re.compile(r"`((?:\.venv/bin/)?(?:diptych [a-z]|python -m (?:diptych|benchmarks)|make [a-z])[^`]*)`")
INCOMPLETE = ("Missing", "requires an argument", "unexpected extra", "Invalid value")


def of_section(section: str) -> list[Block]:
    assert section in OF_SECTION, f"{section} has no commands"
    return OF_SECTION[section]


def is_run(section: str) -> bool:
    return any(section in sections for sections in plan().sessions.values())


def test_every_command_is_run_or_listed() -> None:
    forgotten = [
        f"{block.page}:{block.line}: {command}"
        for block in BLOCKS
        for command in block.commands
        if not is_run(block.section) and not plan().leaves_out(block, command)
    ]
    assert forgotten == [], "name their section in a session of docs_commands.yaml, or list them there under not_run"


def test_what_is_listed_is_there() -> None:
    for entry in plan().not_run:
        there = [command for block in of_section(entry["in"]) for command in block.commands]
        assert [command for command in entry["commands"] if command not in there] == []
        assert len(entry["why"]) > 10
    for entry in plan().shorter:
        assert is_run(entry["in"])
        assert any(entry["text"] in block.text for block in of_section(entry["in"])), entry
        assert len(entry["why"]) > 10
    assert set(plan().long) <= set(plan().sessions)
    every = "\n".join(block.text for block in BLOCKS)
    assert [words for words in plan().stands_for if words not in every] == []


def test_every_session_runs_something_once() -> None:
    sections = [section for each in plan().sessions.values() for section in each]
    assert len(sections) == len(set(sections))
    for section in sections:
        assert any(not plan().leaves_out(b, c) for b in of_section(section) for c in b.commands), section


def test_tests_that_stand_for_commands_exist() -> None:
    for entry in plan().not_run:
        for path in re.findall(r"\b(?:tests|workers)/[\w/]+\.py", entry["why"]):
            assert (ROOT / path).exists(), entry


def test_a_line_of_a_source_is_still_one() -> None:
    [line] = next(e["commands"] for e in plan().not_run if e["in"].startswith("docs/adding-a-model.md"))
    assert line in (ROOT / "workers" / "models" / "families" / "registry.py").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_of_blocks_have_the_flags_that_they_are_given(page: Path) -> None:
    faults: list[str] = []
    for block in BLOCKS:
        variables: dict[str, str] = {}
        if block.language in SHELLS and ROOT / block.page == page:
            for command in block.commands:
                found = [fault for words in simple_commands(command, variables) if (fault := wrong(words))]
                faults += [f"{block.page}:{block.line}: {command}: {fault}" for fault in found]
    assert faults == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_the_text_have_the_flags_that_they_are_given(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it names commands of the past
    faults: list[str] = []
    for span in SPAN.findall(FENCE.sub("", page.read_text())):
        text = re.sub(r"[][]|\|\w+", "", plain(span.replace("\n", " ")))  # what may be left out, and other choices
        for words in simple_commands(text.replace(" --help", "")):
            fault = wrong(words)
            if fault and not any(words in fault for words in INCOMPLETE):
                faults.append(f"{span}: {fault}")
    assert faults == []


def test_wrong_commands_are_found() -> None:
    right = ["diptych bench --rate 3", "make unit PROCESSES=4", "ray up deploy/ray/cluster.yaml", "echo a > b"]
    right += ["kubectl -n diptych logs -f deployment/x", "python -m benchmarks.serving.routing --workers 2"]
    assert [fault for line in right for words in simple_commands(line) if (fault := wrong(words))] == []
    for line in (
        "diptych bench --rat 3",
        "diptych bench --rate fast",
        "diptych serves tiny",
        "make units",
        "ray up --nothing a.yaml",
        "kubectl apply --nothing",
        "python -m benchmarks.serving.routing --worker 2",
        "python -m benchmarks.serving.rout",
        "--plot goodput.svg",
        "echo a && diptych stop --nam x",
        'a="diptych bench"; $a --rat 3',
    ):
        variables: dict[str, str] = {}
        faults = [wrong(words) for part in line.split("; ") for words in simple_commands(part, variables)]
        assert any(faults), line


def test_a_script_leaves_out_what_is_listed_and_nothing_else() -> None:
    [first, _] = of_section("docs/benchmarking.md#comparing-layouts")[0].commands
    [block] = of_section("docs/benchmarking.md#comparing-layouts")
    assert plan().leaves_out(block, first)
    assert [plain(line) for line in script(block).splitlines()] == [
        "python -m benchmarks.serving.goodput --load swing --rates 3 --seconds 4 --warm-up 1 --layout 1p1d 2mixed -- "
        "--no-share-cores"
    ]
