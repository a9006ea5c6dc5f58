"""The rules of the house that a machine can check: who imports whom, and that the protobuf modules are current."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from .support.source import tree_of

ROOT = Path(__file__).parent.parent
# Folders of each room. A file imports from its own folder and from those above it.
FOLDERS = {
    "proto": [""],
    "kernels": [
        "common",
        "elementwise",
        "kv",
        "attention",
        "attention/libraries",
        "mla",
        "gemm",
        "moe",
        "sampling",
        "cpu",
    ],
    "workers": [
        "common",
        "telemetry",
        "kv",
        "grammar",
        "costs",
        "core",
        "speculation",
        "parallel",
        "config",
        "transport",
        "handoff",
        "engine",
        "sampling",
        "models/gguf",
        "models/families",
        "models/plan",
        "models/head_specs",
        "models/rounding",
        "models/quant",
        "models/checkpoint",
        "device",
        "models/layers",
        "models/heads",
        "quantize",
        "ranks",
        "execution/common",
        "execution/cpu",
        "execution/eager",
        "execution/gpu",
        "execution/draft",
        "execution",
        "server",
        "testing",
    ],
    "cluster": [
        "common",
        "tokens",
        "dialects",
        "preflight",
        "routing/output",
        "routing/recall",
        "routing",
        "telemetry",
        "front/access",
        "front/beams",
        "front/retries",
        "front",
        "front/openai",
        "front/responses",
        "front/anthropic",
        "front/prompts",
        "front/dashboard",
        "front/http",
        "front/grpc",
        "picker",
        "client",
        "upgrade",
        "control",
        "placement",
        "traces",
        "bench",
        "batch",
        "simulate",
        "planning",
        "cli",
    ],
}
ROOMS = {"proto": set[str](), "kernels": set[str](), "workers": {"kernels", "proto"}, "cluster": {"proto", "workers"}}
# Of workers, what cluster may import: each file imports without torch (tested below).
NO_TORCH = [
    "common",
    "telemetry",
    "kv",
    "grammar",
    "costs",
    "core",
    "speculation",
    "config",
    "models/families",
    "models/plan",
]
NO_TORCH += ["models/gguf", "models/head_specs"]
STARTS_WORKERS = "cluster/placement/worker_actor.py"
MOST_FILES = 17  # in a folder
MOST_LINES = 400  # in a file
USUAL_LINES, USUAL_SHARE = 300, 0.9  # so large a share of the files has no more lines
FORBIDDEN = {
    "cluster": {"torch", "transformers", "triton", "nixl"},
    "workers": {"ray", "transformers"},
    "kernels": {"ray", "transformers", "grpc"},
    "proto": {"ray", "torch"},
}
MAY_IMPORT = {"cluster/tokens/convert_tokenizer.py": {"transformers"}}  # a separate process
NEVER = {"pickle", "cloudpickle", "dill"}
PROSE = [*ROOMS, "benchmarks", "deploy", "examples", "tests"]  # folders whose comments and docstrings are checked
DOCUMENTED = [*ROOMS, "benchmarks", "examples", "tests/simulation", "tests/support"]  # docstrings begin as we want
FINGERPRINTED = "kernels/cpu/build.py"  # its text is part of a compiled library's fingerprint
# A docstring begins with a verb or the noun that the thing is: no question, relation or pronoun.
REFUSED = re.compile(
    r"(after|as|at|because|before|beside|between|but|by|for|from|here|how|if|in|it|like|neither|no|not|nothing|of|on|once|"
    r"only|over|since|so|such|that|there|they|this|those|through|to|under|until|what|whatever|when|where|whether|which|"
    r"who|whoever|whom|whose|why|with|without)\b",
    re.IGNORECASE,
)
BANNER = re.compile(r"^\s*#\W*[-=─*#]{2,}|#.*[-=─*]{4,}\s*$")


def sources(rooms: Iterable[str] = ROOMS) -> list[Path]:
    return sorted(
        p for room in rooms for p in (ROOT / room).rglob("*.py") if not p.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    )


@cache
def imports(path: Path) -> list[tuple[tuple[str, ...], bool]]:
    """Every import of `path` as (dotted parts, is it inside the package), relative ones resolved."""
    found: list[tuple[tuple[str, ...], bool]] = []
    folder = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(tree_of(path.read_text())):
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


@cache
def file_of(parts: tuple[str, ...]) -> Path:
    """File, from the root, of a module in a room or of a name in one."""
    for length in range(len(parts), 1, -1):
        file = Path(*parts[:length]).with_suffix(".py")
        if (ROOT / file).exists():
            return file
    raise AssertionError(f"there is no module {'.'.join(parts)}")


def folder_of(parts: tuple[str, ...]) -> str:
    """Folder, from the room, of the file that `file_of` finds."""
    return str(Path(*file_of(parts).parts[1:]).parent).strip(".")


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_keep_the_direction_of_the_house(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    room, _, rest = name.partition("/")
    above = FOLDERS[room][: FOLDERS[room].index(str(Path(rest).parent).strip(".")) + 1]
    forbidden = (FORBIDDEN[room] | NEVER) - MAY_IMPORT.get(name, set())
    for parts, inside in imports(path):
        if inside and parts[0] in ROOMS:  # else the package's own __init__: its version
            target, module = parts[0], "/".join(parts)
            assert not any(module.startswith(each.removesuffix(".py")) for each in MAY_IMPORT), f"imports {module}"
            assert target == room or target in ROOMS[room], f"{room} must not import {module}"
            folder = folder_of(parts)
            if target == room:
                assert folder in above, f"{name} must not import {module}: its folder stands below"
            if room == "cluster" and target == "workers" and name != STARTS_WORKERS:
                assert folder in NO_TORCH, f"cluster must not import {module}"
        elif not inside:
            assert parts[0] != "diptych", "inside the package, imports are relative"
            assert parts[0] not in forbidden, f"{room} must not import {parts[0]}"


def cycle_of(graph: dict[str, set[str]]) -> list[str]:
    """Files of which each imports the next; empty if there is no cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def test_no_files_import_each_other() -> None:
    """Imports for type checking count too."""
    graph = {
        str(path.relative_to(ROOT)): {
            str(file_of(parts)) for parts, inside in imports(path) if inside and parts[0] in ROOMS
        }
        for path in sources()
    }
    assert cycle_of(graph) == []
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})[:3] in (list("abc"), list("bca"), list("cab"))


def test_a_class_name_stands_in_one_file() -> None:
    """One name has one meaning."""
    found: dict[str, set[Path]] = defaultdict(set)
    for path in sources():
        for node in ast.walk(tree_of(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(path)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}
    assert sum(length <= USUAL_LINES for length in lengths.values()) >= USUAL_SHARE * len(lengths)


def test_a_folder_holds_no_more_files_than_a_reader_keeps_in_mind() -> None:
    numbers = Counter(path.parent for path in sources())
    assert {str(folder.relative_to(ROOT)): n for folder, n in numbers.items() if n > MOST_FILES} == {}


def banners(text: str) -> list[int]:
    """Numbers of the lines that are banner comments."""
    return [number for number, line in enumerate(text.splitlines(), 1) if BANNER.search(line)]


def test_no_file_needs_banner_comments() -> None:
    found = {str(path.relative_to(ROOT)): banners(path.read_text()) for path in sources(PROSE)}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert banners("x = 1  # a - b\n# -- life ---\n    # ======\n#### ends\n# read -----\n") == [2, 3, 4, 5]


def badly_begun(text: str) -> list[str]:
    """First lines of the docstrings that begin with a refused word."""
    found: list[str] = []
    for node in ast.walk(tree_of(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if REFUSED.match(text):
                found.append(text.splitlines()[0])
    return found


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    paths = {str(path.relative_to(ROOT)): path for path in sources(DOCUMENTED)}
    found = {name: badly_begun(path.read_text()) for name, path in paths.items() if name != FINGERPRINTED}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert badly_begun('"""Number of bytes."""\ndef f():\n    """Of one part.\n\n    More."""') == ["Of one part."]


@pytest.mark.parametrize("folder", NO_TORCH)
def test_what_cluster_imports_of_workers_needs_no_torch(folder: str) -> None:
    stems = sorted(path.stem for path in (ROOT / "workers" / folder).glob("*.py"))
    modules = ", ".join(f"diptych.workers.{folder.replace('/', '.')}.{stem}" for stem in stems)
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
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

    gather(tree_of(path.read_text()).body, set())
    return found


def test_end_to_end_tests_are_where_they_are_looked_for() -> None:
    """All in tests/e2e and tests/launch is marked, elsewhere only GPU tests are: the targets of these names collect
    no other folder."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name, found in marks_of_tests(path).items():
            is_process = path.parent.name in {"e2e", "launch"}
            is_right = "e2e" in found if is_process else "e2e" not in found or "gpu" in found
            assert is_right, f"{path}: {name}"
