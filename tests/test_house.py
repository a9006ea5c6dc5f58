"""The rules of the house that a machine can check: who imports whom, and that the protobuf modules are current."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"proto": set[str](), "kernels": set[str](), "workers": {"kernels", "proto"}, "cluster": {"proto", "workers"}}
# Of workers, what cluster may import: each must import without torch (tested below).
NO_TORCH = {
    "block_manager",
    "channel",
    "cores",
    "errors",
    "event_loop",
    "exit_codes",
    "garbage",
    "kv_layout",
    "kv_plan",
    "live_handoff",
    "models.compiled_limits",
    "models.expert_placement",
    "models.families",
    "models.sharding",
    "models.shards",
    "models.spec",
    "models.weight_bytes",
    "names",
    "prefix_cache",
    "prompt_logprobs",
    "quant.formats",
    "request",
    "runner",
    "scheduler",
    "sequence",
    "timings",
    "wire",
    "worker_config",
}
FORBIDDEN = {
    "cluster": {"torch", "transformers", "triton", "nixl"},
    "workers": {"ray", "transformers"},
    "kernels": {"ray", "transformers", "grpc"},
    "proto": {"ray", "torch"},
}
MAY_IMPORT = {"cluster/convert_tokenizer.py": {"transformers"}}  # a process of its own
NEVER = {"pickle", "cloudpickle", "dill"}


def sources() -> list[Path]:
    return sorted(
        p for room in ROOMS for p in (ROOT / room).rglob("*.py") if not p.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    )


def imports(path: Path) -> list[tuple[tuple[str, ...], bool]]:
    """Every import of `path` as (dotted parts, is it inside the package), relative ones resolved."""
    found: list[tuple[tuple[str, ...], bool]] = []
    folder = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(tuple(a.name.split(".")), False) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = folder[: len(folder) - node.level + 1] + module
                found += [((*base, a.name), True) for a in node.names]
            else:
                found.append((module, False))
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_keep_the_direction_of_the_house(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    forbidden = (FORBIDDEN[room] | NEVER) - MAY_IMPORT.get(str(path.relative_to(ROOT)), set())
    for parts, inside in imports(path):
        if inside:
            target = parts[0]
            module = "/".join(parts)
            assert not any(module.startswith(each.removesuffix(".py")) for each in MAY_IMPORT), f"imports {module}"
            if target not in ROOMS:
                continue  # the package's own __init__: its version
            assert target == room or target in ROOMS[room], f"{room} must not import {'.'.join(parts)}"
            if room == "cluster" and target == "workers" and path.name != "placement.py":
                name = ".".join(parts[1:])
                is_free = any(f"{name}.".startswith(f"{free}.") for free in NO_TORCH)
                assert is_free, f"cluster must not import workers.{name}"
        else:
            assert parts[0] != "diptych", "inside the package, imports are relative"
            assert parts[0] not in forbidden, f"{room} must not import {parts[0]}"


@pytest.mark.parametrize("name", sorted(NO_TORCH))
def test_what_cluster_imports_of_workers_needs_no_torch(name: str) -> None:
    code = f"import sys, diptych.workers.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rooms_are_no_packages_of_their_own() -> None:
    assert not [p for room in ROOMS for p in (ROOT / room).rglob("__init__.py")]


def test_generated_protobuf_modules_are_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "proto" / "generate.py"), str(tmp_path)], check=True)
    generated = {p.name: p.read_text() for p in tmp_path.iterdir()}
    committed = {p.name: p.read_text() for p in (ROOT / "proto").glob("*_pb2*.py*")}
    assert generated == committed, "run `make proto` and commit the result"


def marks(node: ast.AST) -> set[str]:
    """Of what `@pytest.mark.x` or `pytestmark = ...` is written on: each x."""
    found = (ast.unparse(each) for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return {name.removeprefix("pytest.mark.") for name in found if name.startswith("pytest.mark.")}


def marks_of_tests(path: Path) -> dict[str, set[str]]:
    """Of each test, those of its class and its file with them."""
    found: dict[str, set[str]] = {}

    def gather(body: list[ast.stmt], inherited: set[str]) -> None:
        for node in body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                inherited = inherited | marks(node.value)
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                own = inherited.union(*map(marks, node.decorator_list))
                if isinstance(node, ast.ClassDef):
                    gather(node.body, own)
                elif node.name.startswith("test_"):
                    found[node.name] = own

    gather(ast.parse(path.read_text()).body, set())
    return found


def test_end_to_end_tests_are_where_they_are_looked_for() -> None:
    """All of tests/e2e is marked, and nothing else but what a GPU is for: `make e2e` collects no other folder."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name, found in marks_of_tests(path).items():
            is_right = "e2e" in found if path.parent.name == "e2e" else "e2e" not in found or "gpu" in found
            assert is_right, f"{path}: {name}"
