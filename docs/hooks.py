"""Hooks of mkdocs: pages made of files outside docs/, and pictures drawn when the site is built."""

import os
import re
from pathlib import Path
from typing import Any

import mmdr
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).parent.parent
# Pages of the site, by name, that are written elsewhere.
ELSEWHERE = {
    "start.md": "README.md",
    "deploy.md": "deploy/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> None:
    drawn = {"name": "mermaid", "class": "picture", "format": picture}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [drawn]}
    config.mdx_configs["toc"] = {"permalink": True, "slugify": slugify(case="lower")}  # anchors as GitHub names them


def on_files(files: Files, config: MkDocsConfig) -> None:
    for name, path in ELSEWHERE.items():
        files.append(File.generated(config, name, content=with_links_of_the_site(path)))


def with_links_of_the_site(path: str) -> str:
    """Text of a file of the repository. Links to pages of the site lead there, others become plain text."""
    pages = {source: name for name, source in ELSEWHERE.items()}
    pages |= {f"docs/{page.name}": page.name for page in (ROOT / "docs").glob("*.md")}

    def rewritten(link: re.Match[str]) -> str:
        target = os.path.relpath((ROOT / path).parent / link[2], ROOT)
        return f"[{link[1]}]({pages[target]}{link[3] or ''})" if target in pages else link[1]

    return LINK.sub(rewritten, (ROOT / path).read_text())


def picture(source: str, *_args: Any, **_options: Any) -> str:
    """A `mermaid` block as SVG."""
    return f'<div class="picture">{mmdr.render(source).svg()}</div>'
