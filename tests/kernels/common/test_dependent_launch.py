"""Kernels that start while the one before ends keep the rule of kernels/common/dependent_launch.py."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diptych.kernels.common import tuning
from diptych.kernels.common.dependent_launch import dependent_launch, is_asked
from diptych.kernels.common.untried import VARIABLE

KERNELS = Path(__file__).parents[3] / "kernels"
WAITS = {"previous_done", "follow_previous"}
CONSTANTS = {"weight"}  # names of what no kernel writes


def following() -> list[tuple[str, ast.FunctionDef]]:
    """Kernels, and functions that wait for them, with the text of each one's module."""
    found: list[tuple[str, ast.FunctionDef]] = []
    for path in sorted(KERNELS.rglob("*.py")):
        text = path.read_text()
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        found += [(text, of) for of in functions if "PDL" in [a.arg for a in of.args.args]]
    return [(text, of) for text, of in found if of.name not in WAITS | {"let_next_start"}]


def calls(node: ast.AST) -> list[ast.Call]:
    return [of for of in ast.walk(node) if isinstance(of, ast.Call)]


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


FOLLOWING = following()
WAITING = WAITS | {of.name for _, of in FOLLOWING if of.name.startswith("_follow")}


@pytest.mark.parametrize(("text", "kernel"), [pytest.param(*of, id=of[1].name) for of in FOLLOWING])
def test_a_kernel_waits_before_it_reads_what_others_wrote_and_before_it_writes(
    text: str, kernel: ast.FunctionDef
) -> None:
    waits = [i for i, statement in enumerate(kernel.body) if _waits(statement)]
    assert len(waits) == 1, "it waits once, in no loop and under no condition"
    for call in [call for statement in kernel.body[: waits[0]] for call in calls(statement)]:
        assert name_of(call) != "store" and not name_of(call).startswith("atomic")
        if name_of(call) == "load":
            assert {of.id for of in ast.walk(call.args[0]) if isinstance(of, ast.Name)} & CONSTANTS, ast.unparse(call)
    if kernel.name not in WAITING:
        assert text.count("**dependent_launch(") >= 1


def _waits(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and name_of(statement.value) in WAITING
    )


def test_kernels_of_a_decode_layer_follow_each_other() -> None:
    names = {of.name for _, of in FOLLOWING}
    assert names >= {
        "_rms_norm_kernel",
        "_few_rows_kernel",
        "_rope_kv_write_kernel",
        "_decode_attention_kernel",
        "_merge_splits_kernel",
        "_gate_mul_kernel",
    }


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    for found in (tuning.chip_of, is_asked):
        found.cache_clear()
    yield
    for found in (tuning.chip_of, is_asked):
        found.cache_clear()


@pytest.mark.parametrize(
    ("device", "has_it"), [("h200", True), ("h100", True), ("b200", True), ("a100", False), ("mi300x", False)]
)
def test_devices(monkeypatch: pytest.MonkeyPatch, device: str, has_it: bool) -> None:
    monkeypatch.setenv(VARIABLE, "dependent-launch")
    monkeypatch.setenv(tuning.DEVICE_VARIABLE, device)
    assert dependent_launch(torch.device("cpu")) == ({"PDL": True, "launch_pdl": True} if has_it else {"PDL": False})


@pytest.mark.parametrize("asked", ["", "hopper-prompts"])
def test_where_nobody_asks_for_it_launches_are_as_they_were(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(VARIABLE, asked)
    monkeypatch.setenv(tuning.DEVICE_VARIABLE, "h200")
    assert dependent_launch(torch.device("cpu")) == {"PDL": False}


def test_what_interprets_kernels_runs_them_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "all")
    assert dependent_launch(torch.device("cpu")) == {"PDL": False}
