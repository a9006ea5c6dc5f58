"""The commands of the documentation: fenced blocks of shell and Python, by the heading that they stand under."""

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGES = sorted(p for pattern in ("*.md", "docs/*.md", "deploy/**/*.md", "examples/**/*.md") for p in ROOT.glob(pattern))
SHELLS = ("sh", "bash", "shell", "console")
LANGUAGES = (*SHELLS, "python")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ +(.+?)\s*$", flags=re.MULTILINE)
COMMENT = re.compile(r"(^|\s+)#\s.*$")


def slug(heading: str) -> str:
    """Anchor of a heading by GitHub's rule: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # of a link, its text
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


@dataclass(frozen=True)
class Block:
    page: str  # path from the root
    line: int  # of its fence
    section: str  # PAGE#ANCHOR of the heading that it stands under
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Each command of a shell, on one line and without its comment; of Python, the first line of the block."""
        if self.language not in SHELLS:
            return [self.text.splitlines()[0]]
        lines = re.sub(r"\\\n", " ", self.text).splitlines()
        return [found for line in lines if (found := plain(line))]


def plain(line: str) -> str:
    """Return a command with single spaces and without its comment."""
    return " ".join(COMMENT.sub("", line).split())


def blocks(page: Path) -> list[Block]:
    """Blocks of shell and Python, in their order."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    hidden = FENCE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)  # a comment in a block is no heading
    headings = [(m.start(), slug(m[1])) for m in HEADING.finditer(hidden)]
    found: list[Block] = []
    for match in FENCE.finditer(text):
        if match[2] in LANGUAGES:
            section = next((anchor for start, anchor in reversed(headings) if start < match.start()), "")
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(name, line, f"{name}#{section}", match[2], dedent(match[3])))
    return found


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]
