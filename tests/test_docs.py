"""The documentation and the code say the same."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from diptych.cluster.config import ClusterConfig, PoolConfig, RouterConfig, ServiceLevel
from diptych.cluster.config_file import build
from diptych.cluster.timings import RequestTimings

ROOT = Path(__file__).parent.parent
PAGES = sorted(p for pattern in ("*.md", "docs/*.md", "deploy/**/*.md", "examples/**/*.md") for p in ROOT.glob(pattern))


@pytest.mark.parametrize("settings", [ClusterConfig, PoolConfig, RouterConfig, ServiceLevel])
def test_every_setting_is_documented(settings: type[BaseModel]) -> None:
    rows = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "configuration.md").read_text()))
    missing = set(settings.model_fields) - rows - {"pools", "router", "service_level"}
    assert not missing


def test_every_phase_of_a_request_is_documented() -> None:
    words = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "observability.md").read_text()))
    assert words >= {f.name for f in fields(RequestTimings)}


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
