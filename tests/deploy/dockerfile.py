"""A Dockerfile as data, and rules of hadolint and of the CIS benchmark for Docker that it must keep."""

import json
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
KNOWN = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
PINNED = re.compile(r"[\w.-]+\.[a-z]+/[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")  # registry, name, tag and digest
SECRET = re.compile(r"key|secret|token|passw|credential", flags=re.IGNORECASE)


@dataclass(frozen=True)
class Dockerfile:
    text: str

    @cached_property
    def instructions(self) -> list[tuple[str, str]]:
        lines = [line for line in self.text.splitlines() if not line.startswith("#")]
        joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
        found = [line.split(maxsplit=1) for line in joined if line.strip()]
        return [(name, " ".join(rest.split())) for name, rest in found]

    def all_of(self, wanted: str) -> list[str]:
        return [rest for name, rest in self.instructions if name == wanted]

    @cached_property
    def arguments(self) -> dict[str, str]:
        """Defaults of build arguments."""
        pairs = (text.partition("=") for text in self.all_of("ARG"))
        return {name: value.strip('"') for name, _, value in pairs}

    @cached_property
    def last_stage(self) -> list[tuple[str, str]]:
        start = max(i for i, (name, _) in enumerate(self.instructions) if name == "FROM")
        return self.instructions[start:]

    @cached_property
    def copied(self) -> set[str]:
        """Paths of the build context that it copies, build arguments filled in."""
        texts = [text for text in self.all_of("COPY") if not text.startswith("--from")]
        sources = {source for text in texts for source in text.split()[:-1]}
        return {re.sub(r"\$\{(\w+)\}", lambda m: self.arguments[m[1]], source) for source in sources}

    def faults(self) -> list[str]:
        """What breaks a rule."""
        return [*self._wrong_instructions(), *self._wrong_bases(), *self._wrong_commands(), *self._wrong_user()]

    def _wrong_instructions(self) -> list[str]:
        found = [f"unknown instruction {name}" for name, _ in self.instructions if name not in KNOWN]
        given = {name for text in self.all_of("ENV") for name in re.findall(r"(\w+)=", text)} | set(self.arguments)
        found += [f"{name} looks like a secret, and would stay in the image" for name in given if SECRET.search(name)]
        found += [f"{text}: not an absolute path" for text in self.all_of("WORKDIR") if not text.startswith("/")]
        found += [f"{text}: copies what is not named" for text in self.all_of("COPY") if text.split()[0] in (".", "./")]
        if len(self.all_of("HEALTHCHECK")) != 1:
            found.append("no one HEALTHCHECK")
        for name in ("ENTRYPOINT", "CMD"):
            for text in self.all_of(name):
                if not text.startswith("["):
                    found.append(f"{name} through a shell, which would not pass signals on")
        return found

    def _wrong_bases(self) -> list[str]:
        stages: set[str] = set()
        found: list[str] = []
        for text in self.all_of("FROM"):
            image, *rest = text.split()
            image = re.sub(r"\$\{(\w+)\}", lambda m: self.arguments[m[1]], image)
            if image not in stages and (not PINNED.fullmatch(image) or ":latest" in image):
                found.append(f"base {image} is not pinned by registry, tag and digest")
            stages |= set(rest[1:])
        return found

    def _wrong_commands(self) -> list[str]:
        found: list[str] = []
        for text in self.all_of("RUN"):
            words = shlex.split(text)
            if "sudo" in words or "curl" in words or "wget" in words:
                found.append(f"{text}: fetches what nothing checks, or needs no sudo")
            if "apt-get" in words and not {"--yes", "--no-install-recommends", "update", "install"} <= set(words):
                found.append(f"{text}: asks, installs more than is named, or of an old list")
            if "apt-get" in words and "/var/lib/apt/lists/*" not in words:
                found.append(f"{text}: leaves the package lists in a layer")
            for command in re.findall(r"pip install[^&]*", text):
                if "--no-cache-dir" not in command:
                    found.append(f"{command}: leaves a cache in a layer")
                if "--require-hashes" not in command and not {"--no-deps", "--no-index"} <= set(command.split()):
                    found.append(f"{command}: installs what no hash names")
        return found

    def _wrong_user(self) -> list[str]:
        names = [name for name, _ in self.last_stage]
        users = [rest for name, rest in self.last_stage if name == "USER"]
        if not users or not users[-1].isdecimal() or int(users[-1]) == 0:
            return ["ends as root, or as a user that Kubernetes cannot tell from root"]
        later = [name for name in names[names.index("USER") :] if name in ("RUN", "COPY")]
        return [f"{name} after USER" for name in later]


def read(name: str) -> Dockerfile:
    return Dockerfile((ROOT / "deploy" / "docker" / name).read_text())


def words_of(text: str) -> list[str]:
    """Of an ENTRYPOINT or CMD, in JSON."""
    return [str(word) for word in json.loads(text)]
