"""The documentation site builds without a warning, and its pages ask no other host for anything."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What a browser fetches by itself; a link (<a href>) it follows only when asked.
FETCHED = {"src", "srcset", "poster", "data", "action", "background"}
FETCHED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}
IN_CSS = re.compile(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)")


class Fetches(HTMLParser):
    """Addresses on other hosts that a page makes a browser fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = IN_CSS.findall(text)
        self.classes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.classes |= set(values.get("class", "").split())
        asked = [value for name, value in values.items() if name in FETCHED]
        if tag == "use" or (tag == "link" and FETCHED_LINKS & set(values.get("rel", "").split())):
            asked += [values.get("href", ""), values.get("xlink:href", "")]
        self.found += [address for address in asked if re.match(r"(https?:)?//", address)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def test_no_page_fetches_from_another_host(site: Path) -> None:
    pages = {path: Fetches(path.read_text()) for path in site.rglob("*.html")}
    assert {str(path): page.found for path, page in pages.items() if page.found} == {}
    # For an element of this class the theme's script would fetch mermaid: pictures are drawn when the site is built.
    assert not [path for path, page in pages.items() if "mermaid" in page.classes]
    assert {str(path): found for path in site.rglob("*.css") if (found := IN_CSS.findall(path.read_text()))} == {}


def test_every_page_and_picture_is_there(site: Path) -> None:
    for source in (ROOT / "docs").glob("*.md"):
        page = site / ("index.html" if source.stem == "index" else f"{source.stem}/index.html")
        assert page.read_text().count('<div class="picture"><svg') == source.read_text().count("```mermaid")
    assert (site / "start" / "index.html").read_text().count('<div class="picture"><svg') == 1


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://unpkg.com/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        '<link href="https://fonts.example" rel="preconnect">',
        '<img src="http://example.org/a.png">',
        "<style>@import 'https://example.org/a.css';</style>",
        "<p style=\"background: url('https://example.org/a.png')\">",
    ],
)
def test_what_is_fetched_is_found(text: str) -> None:
    assert len(Fetches(text).found) == 1
    assert Fetches('<a href="https://example.org">a</a><link rel="canonical" href="https://example.org">').found == []
