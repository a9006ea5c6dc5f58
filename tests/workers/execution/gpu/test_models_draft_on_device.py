"""Models that draft on the CUDA engine, on a fake device: the tokens of an engine on CPU that has no drafts, and as
many drafts accepted as on CPU."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diptych.workers.common.errors import ConfigError
from diptych.workers.common.request import Request
from diptych.workers.core.draft import ModelDrafts, ModelProposer
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Sequence as Seq
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.models.families.registry import load_spec

from ....support.drafters import FreeRows
from ....support.engines import run, tokens
from ....support.gpu.serving import early, late, load
from ....support.heads import eagle3_config, make_eagle3, make_mtp
from ...conftest import CheckpointOf
from ..draft.conftest import DraftOf
from ..draft.test_draft_model import GREEDY, PENALISED, SAMPLINGS, answers, check_draft_kv, counts
from ..draft.test_draft_model import load as load_on_cpu
from ..draft.test_head_draft import HEADS, TINY, check_entries
from ..draft.test_head_draft import load as load_head_on_cpu

MAX_RUNNING = 8
SETTINGS: dict[str, Any] = {"max_running": MAX_RUNNING, "max_context_tokens": 256, "max_draft_tokens": 4}
Answered = tuple[list[list[int]], tuple[int, int] | None]  # tokens; how many were drafted, and accepted


def answered(path: Path, device: FakeDevice | None, method: str | None = None, **settings: Any) -> Answered:
    """Answers of an engine whose `method` always drafts; None: it has no drafts."""
    method_settings = {} if method is None else {"speculation": method}
    runner = load(path, device, **(SETTINGS | method_settings | settings))
    config: dict[str, Any] = {"chunk_tokens": 40, "max_running": MAX_RUNNING}
    if method is None:
        return answers(Engine(runner, SchedulerConfig(**config)), runner.info.vocab_size, SAMPLINGS), None
    engine = untimed(runner, method, **config)
    return answers(engine, runner.info.vocab_size, SAMPLINGS), counts(engine, method)


class Untimed:
    """A ModelProposer whose passes all take equally long, by what it says: so what is drafted depends on no clock."""

    def __init__(self, own: ModelProposer) -> None:
        self.own = own

    def propose(self, wanted: Sequence[tuple[Seq, int]]) -> ModelDrafts:
        made = self.own.propose(wanted)
        return ModelDrafts(made.drafts, [0.01])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def untimed(runner: ModelRunner, method: str, **config: Any) -> Engine:
    """Engine whose steps always draft."""
    assert runner.proposer is not None
    speculator = FreeRows(method, Untimed(runner.proposer), 4)
    for rows in range(1, 200):
        speculator.measured(rows, 1.0)
    return Engine(runner, SchedulerConfig(**config), drafter=speculator)


@pytest.fixture(scope="module")
def plain() -> Callable[..., list[list[int]]]:
    return cache(lambda path, **settings: answered(path, None, **settings)[0])


@pytest.fixture(scope="module")
def on_cpu() -> Callable[..., Answered]:
    return cache(lambda path, method, **settings: answered(path, None, method, **settings))


def skipping(folder: Path, num_layers: int, skipped: list[int]) -> dict[str, str]:
    file = folder / "skipped.json"
    file.write_text(json.dumps({"num_layers": num_layers, "skipped_layers": skipped}))
    return {"skipped_layers": str(file)}


LONG = pytest.mark.long
WAYS = {"late": (late, True), "early": (early, True), "no graphs": (late, False)}


@pytest.mark.parametrize("way", ["late", pytest.param("early", marks=LONG), "no graphs"])
@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=LONG), 0.15])
def test_a_draft_changes_no_token(
    checkpoint_of: CheckpointOf, draft_of: DraftOf, plain: Any, on_cpu: Any, noise: float, way: str
) -> None:
    make, graphs = WAYS[way]
    path, draft = checkpoint_of("llama"), str(draft_of("llama", noise))
    found, counted = answered(path, make(), "draft", draft_model=draft, cuda_graphs=graphs)
    assert found == plain(path)
    assert counted == on_cpu(path, "draft", draft_model=draft)[1]
    assert counted is not None and counted[0] > 60


@pytest.mark.parametrize(
    ("method", "kv_dtype"),
    [
        pytest.param(method, kv_dtype, marks=() if i == j else LONG)
        for i, method in enumerate(("draft", *HEADS))
        for j, kv_dtype in enumerate(("int4", "int8", "fp8"))
    ],
)
def test_what_drafts_keeps_kv_of_few_bits_as_the_target_does(
    plain: Any, on_cpu: Any, method: str, kv_dtype: str
) -> None:
    """Tokens of an engine on CPU that has no drafts, and KV of as many bits; it drafts as one on CPU."""
    folder = TINY.parent / f"tiny_{method}"
    settings = {"draft_model": str(folder), "kv_dtype": kv_dtype}
    found, counted = answered(TINY, late(), method, **settings)
    assert found == plain(TINY, kv_dtype=kv_dtype)
    assert counted == on_cpu(TINY, method, **settings)[1]
    assert counted is not None and counted[0] > 60


@pytest.mark.parametrize("way", ["late", pytest.param("early", marks=LONG), pytest.param("no graphs", marks=LONG)])
def test_a_model_drafts_for_itself(tmp_path: Path, plain: Any, way: str) -> None:
    make, graphs = WAYS[way]
    settings = skipping(tmp_path, 5, [2])
    found, counted = answered(TINY, make(), "self", cuda_graphs=graphs, **settings)
    assert found == plain(TINY)
    assert counted == answered(TINY, None, "self", **settings)[1]
    assert counted is not None and counted[0] > 60


@pytest.mark.parametrize("way", ["late", pytest.param("early", marks=LONG), pytest.param("no graphs", marks=LONG)])
@pytest.mark.parametrize("method", HEADS)
def test_heads_change_no_token(method: str, plain: Any, on_cpu: Any, way: str) -> None:
    """Their hidden states come from decode graphs, from prompts in pieces, and from large prompts."""
    (make, graphs), head = WAYS[way], str(HEADS[method])
    found, counted = answered(TINY, make(), method, draft_model=head, cuda_graphs=graphs)
    assert found == plain(TINY)
    assert counted == on_cpu(TINY, method, draft_model=head)[1]
    assert counted is not None and counted[0] > 60


def test_the_drafts_kv_is_what_the_draft_computes_alone(checkpoint_of: CheckpointOf, draft_of: DraftOf) -> None:
    """With shared blocks and preemption, as on CPU."""
    draft, settings = draft_of("llama", 0.15), SETTINGS | {"max_running": 16, "kv_memory_bytes": 1200 << 10}
    runner = load(checkpoint_of("llama"), late(), speculation="draft", draft_model=str(draft), **settings)
    check_draft_kv(runner, load_on_cpu(draft, None, cpu_isa="none"))


@pytest.mark.long
@pytest.mark.parametrize("method", HEADS)
def test_entries_are_those_that_a_prompt_of_these_tokens_has(method: str) -> None:
    """With shared blocks and preemption, as on CPU."""
    settings = SETTINGS | {"max_running": 16, "kv_memory_bytes": 1200 << 10}
    runner = load(TINY, late(), speculation=method, draft_model=str(HEADS[method]), **settings)
    check_entries(runner, load_head_on_cpu(TINY, method, HEADS[method], cpu_isa="none"), method)


@pytest.mark.parametrize(
    ("arch", "method"),
    [("deepseek-v3", "draft"), pytest.param("qwen3-windows", "draft", marks=LONG)]
    + [pytest.param(arch, "self", marks=LONG) for arch in ("mixtral", "gemma3", "gptoss", "deepseek-v3")],
)
def test_other_attentions_and_experts(
    checkpoint_of: CheckpointOf, latent_of: CheckpointOf, tmp_path: Path, plain: Any, arch: str, method: str
) -> None:
    """A draft of another architecture, latent attention, mixtures, windows and sinks."""
    path = latent_of(arch) if arch.startswith("deepseek") else checkpoint_of(arch)
    draft = path if arch.startswith("deepseek") else checkpoint_of("llama")
    settings = {"draft_model": str(draft)} if method == "draft" else skipping(tmp_path, load_spec(path).num_layers, [1])
    found, counted = answered(path, late(), method, **settings)
    assert found == plain(path)
    assert counted == answered(path, None, method, **settings)[1]
    assert counted is not None and counted[0] > 20


@pytest.mark.long
@pytest.mark.parametrize("arch", ["qwen3", "mixtral", "gemma3"])
def test_random_heads_of_other_targets(checkpoint_of: CheckpointOf, tmp_path: Path, plain: Any, arch: str) -> None:
    """Norms after layers, mixtures and windows: the hidden states are taken where nothing is left to be added."""
    path, spec = checkpoint_of(arch), load_spec(checkpoint_of(arch))
    sizes = {"vocab_size": spec.vocab_size, "target_hidden_size": spec.hidden_size}
    config = eagle3_config("flat", eagle_aux_hidden_state_layer_ids=[0, 1, spec.num_layers], **sizes)
    head = str(make_eagle3(tmp_path / "head", config, 3))
    found, counted = answered(path, late(), "eagle3", draft_model=head)
    assert found == plain(path)
    assert counted == answered(path, None, "eagle3", draft_model=head)[1]


@pytest.mark.long
def test_a_module_in_the_checkpoint_itself_drafts_with_latent_attention(
    latent_of: CheckpointOf, tmp_path: Path, plain: Any
) -> None:
    path = latent_of("deepseek-v3")
    module = make_mtp(tmp_path / "whole", path, "deepseek", 5, alone=False)
    found, counted = answered(module, late(), "mtp")
    assert found == plain(path)
    assert counted == answered(module, None, "mtp")[1]


def test_a_head_with_keys_and_values_drafts_for_latent_attention(
    latent_of: CheckpointOf, tmp_path: Path, plain: Any
) -> None:
    path, spec = latent_of("deepseek-v3"), load_spec(latent_of("deepseek-v3"))
    sizes = {"vocab_size": spec.vocab_size, "target_hidden_size": spec.hidden_size}
    head = str(make_eagle3(tmp_path / "head", eagle3_config("flat", ids=[1, 2, spec.num_layers], **sizes), 3))
    found, counted = answered(path, late(), "eagle3", draft_model=head, cuda_graphs=False)
    assert found == plain(path)
    assert counted == answered(path, None, "eagle3", draft_model=head)[1]
    assert counted is not None and counted[0] > 60


def compare_drafts(path: Path, drafting: dict[str, str]) -> None:
    """A few tokens, of rows with penalties and without."""
    samplings = [replace(of, max_tokens=5) for of in (GREEDY, PENALISED)]
    found: list[dict[str, list[int]]] = []
    for settings in ({}, drafting):
        device = late() if settings else None
        runner = load(
            path, device, max_running=2, max_context_tokens=64, max_draft_tokens=4, cuda_graphs=False, **settings
        )
        engine = untimed(runner, settings["speculation"]) if settings else Engine(runner, SchedulerConfig())
        for i, sampling in enumerate(samplings):
            engine.submit(f"0/{i}", Request(str(i), (5, 6, 7, 8, 9), sampling, 60.0), [])
        outputs = run(engine)
        found.append({key: [event.token_id for event in tokens(outputs, key)] for key in ("0/0", "0/1")})
    assert found[0] == found[1]


def test_a_draft_that_the_kernels_cannot_compute_is_refused(
    checkpoint_of: CheckpointOf, latent_of: CheckpointOf
) -> None:
    drafting = {"speculation": "draft", "draft_model": str(checkpoint_of("deepseek-v3"))}
    with pytest.raises(ConfigError, match="does not support latents and heads of sizes other than powers of 2"):
        load(latent_of("deepseek-v3"), early(), **(SETTINGS | drafting))
