"""The documentation and the code say the same."""

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

ROOT = Path(__file__).parent.parent
PAGES = sorted(p for pattern in ("*.md", "docs/*.md", "deploy/**/*.md", "examples/**/*.md") for p in ROOT.glob(pattern))


@pytest.mark.parametrize("settings", [ClusterConfig, PoolConfig, RouterConfig, ServiceLevel])
def test_every_setting_is_documented(settings: type[BaseModel]) -> None:
    rows = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "configuration.md").read_text()))
    missing = set(settings.model_fields) - rows - {"pools", "router", "service_level"}
    assert not missing


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


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
