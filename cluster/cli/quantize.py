"""`diptych quantize`: a checkpoint in fewer bits, made by a process of its own, for this one knows no torch."""

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ...workers.common.errors import ConfigError, InternalError
from ...workers.common.exit_codes import GIVEN
from ...workers.config.extras import check_installed
from ...workers.models.plan.quantize_job import GPTQ, METHODS, WRITTEN, QuantizeJob
from ...workers.models.plan.quantize_plan import check_source
from ..preflight.checks import check_model, resolve_model
from .progress import Progress, StartPhase

MODULE = "diptych.workers.quantize.command"
GIB = 1 << 30
MIB = 1 << 20
STOP_S = 30.0  # for a process to take away what it has begun


def quantize(  # noqa: PLR0913, PLR0917  typer makes a flag of each parameter
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face checkpoint that is not quantised, or `tiny`.")],
    format: Annotated[str, typer.Option(help=f"{', '.join(WRITTEN)}: see docs/quantization.md.")],
    out: Annotated[Path, typer.Option(help="Folder to make; it appears whole, or not at all.")],
    calibrate: Annotated[
        Path | None, typer.Option(help="Text of the kind that the model will meet: plain, or .jsonl with `text`.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(METHODS)}.  [default: rtn; with --calibrate gptq, and smoothquant for w8a8]"),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Module that stays as it is, by name, or by re: and a regular expression; may be repeated."),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="int4: inputs that share a scale.  [default: the first of 128, 64, 32 that fits]")
    ] = None,
    samples: Annotated[int, typer.Option(help="Sequences of the text.")] = 128,
    sequence_tokens: Annotated[int, typer.Option(help="Tokens of a sequence, at most.")] = 512,
    act_order: Annotated[bool, typer.Option(help="gptq: inputs of the largest activations first.")] = True,
    damping: Annotated[float, typer.Option(help="gptq: of the mean diagonal of the Hessian, added to it.")] = 0.01,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            help="GiB that this may take: a layer's weights twice, the text's activations, and as many Hessians as "
            "fit.  [default: what is free]"
        ),
    ] = None,
) -> None:
    """Write MODEL in fewer bits, as compressed-tensors: for Diptych, vLLM and transformers. Rounds to nearest, or by
    calibration text; one layer at a time, on CPU."""
    folder = Path(resolve_model(model))
    job = QuantizeJob(
        str(folder),
        str(out.expanduser().absolute()),
        format,
        str(calibrate.expanduser().absolute()) if calibrate is not None else None,
        method,
        tuple(ignore or ()),
        group_size,
        samples,
        sequence_tokens,
        act_order,
        damping,
        int(memory_gib * GIB) if memory_gib is not None else None,
    )
    job.check()
    check_installed("`diptych quantize`", ("torch", "safetensors"))
    check_model(folder)
    check_source(job)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    title = f"quantising {folder.name} to {format} by {job.chosen_method}"
    with Progress(console).phase(title) as phase:
        made = _made(job, phase)
        phase.done = (
            f"{out}: {made['num_weights']} weights in {format} by {job.chosen_method}, "
            f"{made['before_bytes'] / MIB:,.1f} -> {made['num_bytes'] / MIB:,.1f} MiB, relative error "
            f"{made['relative_error']:.2%} of {'products' if job.chosen_method == GPTQ else 'weights'}"
        )


def _made(job: QuantizeJob, phase: StartPhase) -> dict[str, Any]:
    """Run the process. Raises what it says is wrong."""
    last: dict[str, Any] = {}
    with _process() as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(job.to_json()) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            last = json.loads(line)
            if "note" in last:
                phase.note(last["note"])
        code = process.wait()
    if "done" in last:
        return last["done"]
    if "error" in last:
        raise (ConfigError if last["code"] == GIVEN else InternalError)(last["error"])
    what = f"signal {-code}" if code < 0 else f"exit code {code}"
    remedy = " (was it out of memory? Allow less with --memory-gib)" if code == -9 else ""
    raise InternalError(f"the process that quantises ended with {what}{remedy}: what it printed says why")


@contextmanager
def _process() -> Generator[subprocess.Popen[str]]:
    """Start the process; it has ended when the block has."""
    process = subprocess.Popen([sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
