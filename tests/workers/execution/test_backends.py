"""Backends stay behind their interface: only factory.py names one, and no code asks which one it has."""

import ast
from pathlib import Path

from ...support.source import tree_of

ROOT = Path(__file__).parents[3]
EXECUTION = ROOT / "workers" / "execution"
FACTORY = EXECUTION / "factory.py"
OTHERS = ("common", "draft")  # the interface, and what backends share; what drafts, by the interface
BACKENDS = sorted(p.name for p in EXECUTION.iterdir() if p.is_dir() and p.name not in OTHERS and any(p.glob("*.py")))


def sources() -> list[Path]:
    return sorted(p for room in ("workers", "cluster") for p in (ROOT / room).rglob("*.py"))


def backend_classes() -> set[str]:
    """Classes of the backends, of the host backend and of the interface."""
    files = (p for p in EXECUTION.rglob("*.py") if p.parent != EXECUTION)
    return {node.name for p in files for node in ast.walk(tree_of(p.read_text())) if isinstance(node, ast.ClassDef)}


def imported_backends(path: Path, tree: ast.AST) -> set[str]:
    """Folders of backends that a file imports from, other than its own."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            base = path.parents[node.level - 1].joinpath(*node.module.split("."))
            found |= {name for name in BACKENDS if (EXECUTION / name) in (base, *base.parents)}
    return found - {path.parent.name}


def type_tests(tree: ast.AST) -> list[str]:
    """Second arguments of isinstance and issubclass, and attributes probed by hasattr and getattr on a backend."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and len(n.args) > 1]
    tests = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id in ("isinstance", "issubclass")]
    probes = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id in ("hasattr", "getattr")]
    names = [n.id for c in tests for n in ast.walk(c.args[1]) if isinstance(n, ast.Name)]
    return names + [f"probe {ast.unparse(c)}" for c in probes if "backend" in ast.unparse(c.args[0]).lower()]


def test_there_are_backends() -> None:
    assert BACKENDS == ["cpu", "eager", "gpu"]
    assert {"GpuSteps", "CompiledSteps", "EagerSteps", "HostBackend", "Backend"} <= backend_classes()


def test_only_the_factory_imports_a_backend() -> None:
    for path in sources():
        found = imported_backends(path, tree_of(path.read_text()))
        assert path == FACTORY or not found, f"{path.relative_to(ROOT)} imports {sorted(found)}: use the interface"
    assert imported_backends(FACTORY, tree_of(FACTORY.read_text())) == set(BACKENDS)


def test_no_code_asks_which_backend_it_has() -> None:
    # A plan is data, not a backend: a rank's message is a plan or blocks to copy.
    classes = backend_classes() - {"StepPlan"}
    for path in sources():
        found = [name for name in type_tests(tree_of(path.read_text())) if name in classes or " " in name]
        assert path == FACTORY or not found, f"{path.relative_to(ROOT)} asks for {found}: put it behind the interface"


def test_a_type_test_and_an_import_would_be_found() -> None:
    planted = "from .gpu.gpu_steps import GpuSteps\nisinstance(x, (int, GpuSteps)); hasattr(self.backend, 'device')"
    tree = tree_of(planted)
    assert type_tests(tree) == ["int", "GpuSteps", "probe hasattr(self.backend, 'device')"]
    assert imported_backends(EXECUTION / "model_runner.py", tree) == {"gpu"}
