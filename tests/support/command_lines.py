"""Commands as text: which programs they call, with which flags; and what is wrong with these."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from diptych.cluster.cli.main import app
from diptych.workers.config.worker_config import SETTINGS

from .pages import ROOT

PUNCTUATION = set("();<>|&{}")
SUBSTITUTION = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")  # with two levels of parentheses in it
ASSIGNMENT = re.compile(r"(\w+)=(.*)", flags=re.DOTALL)
WORKER = "workers/server/worker.py"  # its flags are made of its settings
# Programs of others, which are not asked what flags they know.
OTHERS = {"aws", "curl", "docker", "echo", "export", "gcloud", "helm", "kind", "mkdir", "pip", "python3", "umask"}


def simple_commands(line: str, variables: dict[str, str] | None = None) -> Iterator[list[str]]:
    """Words of each simple command of a line. `variables` are set by the lines before it, and by this one."""
    known = {} if variables is None else variables
    line = re.sub(r"\$(\w+)", lambda m: known.get(m[1], m[0]), line)
    line = SUBSTITUTION.sub("VALUE", re.sub(r"^\w+\(\) \{.*\}$", "", line))  # of a function's definition nothing
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    is_file = False  # the next word, of a redirection
    for word in [*lexer, ";"]:
        if set(word) <= PUNCTUATION and not set(word) <= {"<", ">"}:
            if words:
                yield words
            words = []
        elif not words and (found := ASSIGNMENT.fullmatch(word)):
            known[found[1]] = found[2]
        elif not is_file and not set(word) <= PUNCTUATION:
            words.append(word)
        is_file = set(word) <= {"<", ">"}


def wrong(words: list[str]) -> str | None:
    """Return what is wrong with a simple command; None: nothing. Of programs in OTHERS nothing is known."""
    program, arguments = words[0].rpartition("/")[2], words[1:]
    if program == "diptych":
        return wrong_click(own_command(), arguments)
    if program == "ray":
        from ray.scripts.scripts import cli

        return wrong_click(cli, arguments)
    if program == "make":
        return next((f"no target {a}" for a in arguments if "=" not in a and a not in targets()), None)
    if program == "kubectl":
        return wrong_kubectl(arguments)
    if program == "python" and arguments[:1] == ["-m"]:
        return wrong_module(arguments[1], arguments[2:])
    return None if program in OTHERS else f"unknown program {program}"


@cache
def own_command() -> Any:
    return typer.main.get_command(app)


def wrong_click(command: Any, arguments: list[str]) -> str | None:
    """Parse the arguments as a command of click does before it runs; return what it would say.

    Typer may have a click of its own, whose classes are not click's.
    """
    while hasattr(command, "get_command"):
        name, *arguments = arguments or [""]
        if (found := command.get_command(command.context_class(command), name)) is None:
            return f"no command {name}"
        command = found
    try:
        command.make_context(command.name, list(arguments))
    except Exception as e:
        if not hasattr(e, "format_message"):
            raise
        return str(e.format_message())
    return None


@cache
def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@cache
def flags_of_file(path: str) -> frozenset[str]:
    """Flags that a script's source adds to its parser, and those of the scripts beside it that it imports."""
    tree, found = ast.parse((ROOT / path).read_text()), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("-")]
            found |= {str(name) for name in names} | {f"--no-{str(name)[2:]}" for name in names}
    return frozenset(found)


def wrong_module(module: str, arguments: list[str]) -> str | None:
    path = module.removeprefix("diptych.").replace(".", "/") + ".py"
    if not (ROOT / path).exists():
        return f"no module {module}"
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    given = {word.partition("=")[0] for word in own if re.match(r"--?[a-z]", word)}
    known = flags_of_file(path)
    if path == WORKER:
        known = known | {setting.flag for setting in SETTINGS.values()}
    unknown = given - known - {"--help"}
    return f"unknown flags of {module}: {', '.join(sorted(unknown))}" if unknown else None


@cache
def kubectl_help(*words: str) -> str:
    kubectl = Path(sys.executable).with_name("kubectl")
    return subprocess.run([kubectl, *words], capture_output=True, text=True, check=True).stdout


def wrong_kubectl(arguments: list[str]) -> str | None:
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    flags = [word.partition("=")[0] for word in before if word.startswith("-")]
    words = [word for word in before if not word.startswith("-") and word != "diptych"]  # a namespace
    text = kubectl_help(*words, "--help") + kubectl_help("options")
    unknown = [flag for flag in flags if not re.search(rf"(^|[\s,]){re.escape(flag)}\b", text)]
    return f"kubectl {' '.join(words)} has no {', '.join(unknown)}" if unknown else None
