"""The documentation agrees with the code."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from diptych.cluster.bench.command import bench
from diptych.cluster.bench.report import Result, to_json
from diptych.cluster.bench.stats import summarise
from diptych.cluster.bench.types import Reply
from diptych.cluster.common.config import ClusterConfig, PoolConfig, RouterConfig, ServiceLevel
from diptych.cluster.common.config_file import build
from diptych.cluster.common.timings import RequestTimings
from diptych.cluster.front.openai.types import ChatBody, CompletionBody, StreamOptions
from diptych.workers.common.settings import Scope
from diptych.workers.config.worker_config import SETTINGS

from .support.pages import PAGES, slug
from .test_house import FOLDERS

ROOT = Path(__file__).parent.parent


def documented(heading: str) -> set[str]:
    """Names in the first column of the table under a heading of docs/configuration.md."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}


@pytest.mark.parametrize(
    ("heading", "settings"),
    [
        ("The cluster", ClusterConfig),
        ("`pools.prefill`, `pools.decode`, `pools.mixed`", PoolConfig),
        ("`router`", RouterConfig),
        ("`service_level`", ServiceLevel),
    ],
)
def test_the_documented_settings_are_those_that_there_are(heading: str, settings: type[BaseModel]) -> None:
    assert documented(heading) == set(settings.model_fields) - {"pools", "router", "service_level"}


def test_every_setting_of_a_worker_is_in_yaml_or_set_by_the_cluster() -> None:
    """In YAML: in the tables that are tested above."""
    in_yaml = set(ClusterConfig.model_fields) | set(PoolConfig.model_fields)
    own = {setting.flag for setting in SETTINGS.values() if setting.scope is Scope.PROCESS} - {"--auth-token", "--tls"}
    assert documented("Flags") == own | {"--tls-ca", "--tls-cert", "--tls-key"}  # files
    assert {name for name, setting in SETTINGS.items() if setting.scope is not Scope.PROCESS} <= in_yaml


@pytest.mark.parametrize("body", [CompletionBody, ChatBody, StreamOptions])
def test_every_served_field_is_documented(body: type[BaseModel]) -> None:
    words = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "openai.md").read_text()))
    assert words >= set(body.model_fields)


def test_every_phase_of_a_request_is_documented() -> None:
    words = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "observability.md").read_text()))
    assert words >= {f.name for f in fields(RequestTimings)}


def test_every_flag_and_figure_of_bench_is_documented() -> None:
    text = (ROOT / "docs" / "benchmarking.md").read_text()
    names = set(inspect.signature(bench).parameters) - {"more_levels", "json_file"} | {"json"}
    assert {f"--{name.replace('_', '-')}" for name in names} <= set(re.findall(r"--[a-z-]+", text))
    result = Result({}, [Reply(0.0)], summarise([], 1.0, {}), {}, 0.0, 0.0, "")
    row = to_json(result)
    words = set(re.findall(r"`(\w+)`", text))
    assert {re.sub("_(ttft|tpot|itl|e2el)_", "_M_", name) for name in row} | set(row["requests"][0]) <= words


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_settings_shown_in_yaml_are_accepted(page: Path) -> None:
    for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), flags=re.DOTALL):
        settings = yaml.safe_load(text)
        if "pools" in settings:
            build({"model": "tiny"} | settings)


# An inline code span or a fenced block, and its content.
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
SOURCE_SUFFIXES = {".py", ".cpp", ".c", ".h", ".proto"}
# A path, and a name that its file defines: `workers/core/scheduler.py::Scheduler.schedule`.
PATH = re.compile(r"(?<![\w./-])[\w.*/-]+(?:::[\w.]+)?")
MODULE = re.compile(r"(?:diptych\.(?:cluster|workers|kernels|proto)|benchmarks|tests)(?:\.\w+)+")
MAX_ARCHITECTURE_WORDS = 1500


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, numbered where they repeat."""
    found: dict[str, int] = {}
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?)\s*$", prose(page), flags=re.MULTILINE):
        name = slug(heading)
        anchors.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return anchors


def wrong_links(text: str, page: Path) -> list[str]:
    faults: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        name, _, anchor = target.partition("#")
        to = page.parent / name if name else page
        if "://" not in target and not (to.exists() and (not anchor or anchor in slugs(to))):
            faults.append(target)
    return faults


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert wrong_links(page.read_text(), page) == []


def named_paths(text: str) -> list[str]:
    """Paths in code spans and fenced blocks, in their order; of a module its file."""
    spans = [(m.start(), m[2]) for m in FENCE.finditer(text)]
    inline = FENCE.sub(lambda m: " " * len(m[0]), text)
    spans += [(m.start(), m[1]) for m in INLINE.finditer(inline)]
    found: list[str] = []
    for _, code in sorted(spans):
        for word in PATH.findall(code):
            if MODULE.fullmatch(word):
                path = word.removeprefix("diptych.").replace(".", "/")
                found.append(f"{path}.py" if (ROOT / f"{path}.py").exists() else path)
            elif is_path_of_ours(word.partition("::")[0]):
                found.append(word)
    return found


def is_path_of_ours(word: str) -> bool:
    """A path from the root, a folder, or a source file's name. Not: a checkpoint's config.json, /v1/models."""
    if word.startswith(("/", ".", "*")):
        return False
    is_from_root = "/" in word and (ROOT / word.partition("/")[0]).is_dir()
    return is_from_root or word.endswith("/") or Path(word).suffix in SOURCE_SUFFIXES


def defines(file: Path, name: str) -> bool:
    return re.search(rf"\b(def|class|struct) {name}\b|\b{name}(\(| = |: )", file.read_text()) is not None


def wrong_names(text: str) -> list[str]:
    """A path stands from the root. A bare name stands for the one file of that name that the page named before, or one
    at the root; of a folder, for one within a folder that it named. What stands behind `::` is defined in the file."""
    faults: list[str] = []
    before: set[str] = set()
    for named in named_paths(text):
        path, _, name = named.partition("::")
        found = list(ROOT.glob(path))
        if found:
            before.add(path)
        elif path.endswith("/"):
            found = [ROOT / each / path for each in before if (ROOT / each / path).is_dir()]
        elif "/" not in path:
            found = [ROOT / each for each in before if Path(each).name == path]
        is_there = len(found) == 1 or (found and "*" in path)
        if not is_there or any(not defines(found[0], part) for part in name.split(".") if part):
            faults.append(named)
    return faults


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_pages_name_exist(page: Path) -> None:
    assert page.name == "CHANGELOG.md" or wrong_names(page.read_text()) == []  # the changelog names files of the past


def test_wrong_names_and_links_are_found() -> None:
    """Of names that are right, and of names and links that are not."""
    right = "`workers/core/scheduler.py`, `scheduler.py::Scheduler.schedule`, `setup.py`, `kernels/`, `config.json`"
    assert wrong_names(right + " `python -m diptych.workers.server.worker`") == []
    assert wrong_names("`scheduler.py`, `workers/scheduler.py`") == ["scheduler.py", "workers/scheduler.py"]
    assert wrong_names("`workers/core/`, `core/`, `workers/`, `core/`, `cores/`") == ["core/", "cores/"]
    assert wrong_names("`cluster/front/http/api.py`, `cluster/front/grpc/api.py`, `api.py`") == ["api.py"]
    unknown = "workers/core/scheduler.py::Scheduler.nothing"
    assert wrong_names(f"`{unknown}`") == [unknown]
    assert wrong_names("```sh\npython benchmarks/nothing.py\n```\n") == ["benchmarks/nothing.py"]
    assert wrong_names("`python -m benchmarks.engine.engine`, `python -m benchmarks.engine.nothing`") == [
        "benchmarks/engine/nothing"
    ]
    page = ROOT / "docs" / "engine.md"
    assert (
        wrong_links("[a](kernels.md) [b](#prefix-cache) [c](gpu.md#the-cuda-engine) [d](https://x.org/#y)", page) == []
    )
    wrong = ["nothing.md", "#nothing", "gpu.md#nothing"]
    assert wrong_links(" ".join(f"[a]({target})" for target in wrong), page) == wrong


def test_architecture_is_short() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    words = re.findall(r"\S*\w\S*", re.sub(r"^```mermaid\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    assert len(words) <= MAX_ARCHITECTURE_WORDS, f"{len(words)} words: move what is not needed at first to its own page"


@pytest.mark.parametrize("room", ["kernels", "workers", "cluster"])
def test_the_architecture_lists_all_folders_in_the_order_of_imports(room: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    cells = re.findall(r"^\| (`.*?`) \|", text, flags=re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(rf"`{room}/([\w/]+)/`", cell)]
    folders = [next((n for n in listed if f"{folder}/".startswith(f"{n}/")), folder) for folder in FOLDERS[room]]
    assert listed == [folder for folder, before in zip(folders, [None, *folders], strict=False) if folder != before]


def test_the_map_names_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = set(re.findall(r"\]\(([^)#\s]+)", index.read_text()))
    assert {p.name for p in index.parent.glob("*.md")} - {index.name} <= linked
