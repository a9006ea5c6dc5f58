"""Flags of `diptych plan` alone."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="Folder with a Hugging Face config.json, a GGUF file, or `tiny`.")]
ForMemory = Annotated[
    bool, typer.Option("--memory", help="Weights and KV of each rank, and what fits: the plan without --gpus.")
]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32.")]
Quantize = Annotated[str | None, typer.Option(help="Weights at load: int8, int4, fp8, w8a8 or mxfp4.")]
KVDtype = Annotated[str, typer.Option(help="Of the KV cache: auto (as --dtype), int8, fp8, int4 or kivi.")]
TensorParallel = Annotated[int, typer.Option(min=1, help="Ranks of a worker.")]
ExpertParallel = Annotated[int, typer.Option(min=1, help="As many: ranks have whole experts.")]
DataParallel = Annotated[int, typer.Option(min=1, help="Workers that share a mixture's experts.")]
Speculation = Annotated[str | None, typer.Option(help="draft, eagle3 or mtp: what --draft-model is.  [default: draft]")]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help="Folder of a model or head that drafts, or `tiny_draft`: its weights and KV count too. For mtp MODEL may "
        "hold it."
    ),
]
DraftTensorParallel = Annotated[
    int | None, typer.Option(min=1, help="Ranks that compute a draft model: 1, or all.  [default: --tensor-parallel]")
]
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens a KV block.")]
MaxContextTokens = Annotated[int | None, typer.Option(min=1, help="Longest sequence.  [default: the model's]")]
Device = Annotated[str, typer.Option(help="cpu or cuda: a GPU for each rank.")]
RankMemory = Annotated[
    str | None, typer.Option(help="What each rank may use, as 80GiB.  [default: on cpu this machine's share]")
]
KVMemory = Annotated[str | None, typer.Option(help="KV cache of a worker, as 2GiB.  [default: by fraction]")]
KVMemoryFraction = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=0.95, help="Of what is free once the weights are there.  [default: 0.3; with --gpus 0.85]"
    ),
]
Gpus = Annotated[
    str | None, typer.Option(help="KIND:N, as H100:8: search the layouts of a cluster on them, by simulation.")
]
Ttft = Annotated[float | None, typer.Option(help="Service level: time to first token, ms.")]
Tpot = Annotated[float | None, typer.Option(help="Service level: time per output token, ms.")]
LevelShare = Annotated[float, typer.Option(help="Of the requests that must meet the level, %.")]
Rate = Annotated[
    float | None, typer.Option(help="Requests a second: the fewest GPUs for it.  [default: all, highest rate]")
]
Output = Annotated[Path | None, typer.Option(help="Write the best layout there, for `diptych serve --config`.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the best three there (.svg, .png, .html).")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes that simulate.  [default: one a core]")]
