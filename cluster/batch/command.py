"""The command `diptych batch`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...workers.common.errors import ConfigError
from ...workers.common.exit_codes import FOUND


def batch(  # noqa: PLR0913, PLR0917  typer makes a flag of each parameter
    file: Annotated[Path, typer.Argument(help="Requests: JSON lines in the format of OpenAI's batches.")],
    output: Annotated[
        Path | None, typer.Option(help="Answers.  [default: FILE with the ending .output.jsonl]", show_default=False)
    ] = None,
    failures: Annotated[
        Path | None,
        typer.Option(help="Failed requests.  [default: FILE with the ending .errors.jsonl]", show_default=False),
    ] = None,
    url: Annotated[str, typer.Option(help="http[s]://HOST:PORT of an OpenAI API.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="DIPTYCH_API_KEY", help="Other users of this machine can read a flag.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests at once.")] = 64,
    attempts: Annotated[int, typer.Option(min=1, max=100, help="Of a request that is refused for a time.")] = 8,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds an attempt.")] = 600.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue: send what the output does not answer, and what failed.")
    ] = False,
) -> None:
    """Send the requests of a batch file to a server, and write their answers to a file."""
    from ..bench.settings import parse_url
    from .run import BatchFiles, run_batch
    from .sender import SendConfig

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, got {url!r}")
    parse_url(url)
    files = BatchFiles(file, output or file.with_suffix(".output.jsonl"), failures or file.with_suffix(".errors.jsonl"))
    if len({p.resolve() for p in (files.source, files.output, files.failures)}) < 3:
        raise ConfigError("FILE, --output and --failures must be three files")
    config = SendConfig(url, (api_key or "").strip() or None, concurrency, attempts, timeout)
    tally = run_batch(files, config, Console(stderr=True), resume=resume)
    if tally.num_failures:
        Console(stderr=True).print(
            f"{files.failures} says why; send them again with --resume", soft_wrap=True, markup=False
        )
        raise typer.Exit(FOUND)
