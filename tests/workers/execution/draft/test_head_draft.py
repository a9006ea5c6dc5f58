"""Drafts of heads that read the target's hidden states: answers are those without, entries are those of a prompt."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from diptych.workers.common.errors import CheckpointError, ConfigError, UnsupportedArchitecture
from diptych.workers.common.request import Request
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.kv.layout import DOT, ROWS

from ....support.checkpoints import random_prompts
from ....support.engines import assert_clean, run, tokens
from ....support.heads import eagle3_config, make_eagle3, make_mtp
from ...conftest import CheckpointOf
from .test_draft_model import EXAMPLES, GREEDY, LENGTHS, SAMPLINGS, SEEDED, Drafting, answers, counts, draft_kv

TINY = EXAMPLES / "tiny"
HEADS = {"eagle3": EXAMPLES / "tiny_eagle3", "mtp": EXAMPLES / "tiny_mtp"}


def load(path: Path, method: str | None, head: Path | None = None, **changes: Any) -> ModelRunner:
    config = WorkerConfig.of(path, dtype="float32", max_context_tokens=256, kv_memory_bytes=64 << 20)
    drafting = {} if method is None else {"speculation": method, "draft_model": None if head is None else str(head)}
    return ModelRunner.load(config.changed(**drafting, **changes))


@pytest.mark.parametrize("isa", ["auto", "none"])
@pytest.mark.parametrize("method", HEADS)
def test_answers_are_those_without_drafts(method: str, isa: str) -> None:
    plain = load(TINY, None, cpu_isa=isa)
    expected = answers(Engine(plain, SchedulerConfig()), plain.info.vocab_size, SAMPLINGS)
    runner = load(TINY, method, HEADS[method], cpu_isa=isa)
    drafting = Drafting(runner, chunk_tokens=40, method=method)
    assert answers(drafting.engine, runner.info.vocab_size, SAMPLINGS) == expected
    drafted, accepted = counts(drafting.engine, method)
    assert drafted > 60
    assert accepted > 10
    assert [group.uniform.packing for group in runner.layout.layer_groups(0, runner.layout.num_layers)] == (
        [ROWS, ROWS] if isa == "none" else [runner.layout.packing] * 2
    )


@pytest.mark.parametrize("method", HEADS)
def test_the_shipped_heads_are_right_about_what_they_were_taught(method: str) -> None:
    """Accepted tokens of a draft of four: more than two on average, with the one after them."""
    runner = load(TINY, method, HEADS[method])
    drafting = Drafting(runner, method=method)
    plain = load(TINY, None)
    question = plain_question()
    request = Request("0", question, replace(GREEDY, max_tokens=48, ignore_eos=False), 60.0)
    engine = Engine(plain, SchedulerConfig())
    engine.submit("0/0", request, [])
    expected = [event.token_id for event in tokens(run(engine), "0/0")]
    drafting.engine.submit("0/0", request, [])
    outputs = run(drafting.engine)
    assert [event.token_id for event in tokens(outputs, "0/0")] == expected
    yields = list(drafting.engine.check_integrity().load.draft_yields)
    assert sum(i * num for i, num in enumerate(yields, 1)) >= 2.0 * sum(yields)


def plain_question() -> tuple[int, ...]:
    """Token ids of a question that the shipped model was taught, in its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    chat = [{"role": "user", "content": "What is Diptych?"}]
    return tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])


@pytest.mark.parametrize("arch", ["qwen3", "mixtral", "gemma3"])
@pytest.mark.parametrize("isa", ["auto", "none"])
def test_random_heads_of_other_targets(checkpoint_of: CheckpointOf, tmp_path: Path, arch: str, isa: str) -> None:
    """Norms after layers, mixtures and windows: the hidden states are taken where nothing is left to be added."""
    path = checkpoint_of(arch)
    plain = load(path, None, cpu_isa=isa)
    vocab_size, num_layers = plain.info.vocab_size, plain.layout.num_layers
    target = json.loads((path / "config.json").read_text())
    target = target.get("text_config") or target
    sizes = {"vocab_size": vocab_size, "target_hidden_size": target["hidden_size"]}
    config = eagle3_config("flat", eagle_aux_hidden_state_layer_ids=[0, 1, num_layers], **sizes)
    head = make_eagle3(tmp_path / "head", config, 3)
    expected = answers(Engine(plain, SchedulerConfig()), vocab_size, SAMPLINGS)
    runner = load(path, "eagle3", head, cpu_isa=isa)
    assert answers(Drafting(runner, method="eagle3").engine, vocab_size, SAMPLINGS) == expected


@pytest.mark.parametrize(("arch", "names"), [("deepseek-v3", "deepseek"), ("qwen3", "qwen3-next")])
def test_a_checkpoint_with_a_module_inside_is_served_with_and_without_drafts(
    checkpoint_of: CheckpointOf, tmp_path: Path, arch: str, names: str
) -> None:
    """One with latent attention, too; its KV is that of the checkpoint without the module."""
    path = checkpoint_of(arch)
    whole = make_mtp(tmp_path / "whole", path, names, 5, alone=False)
    plain, beside = load(path, None), load(whole, None)
    expected = answers(Engine(plain, SchedulerConfig()), plain.info.vocab_size, SAMPLINGS)
    assert answers(Engine(beside, SchedulerConfig()), plain.info.vocab_size, SAMPLINGS) == expected
    assert beside.layout == plain.layout
    runner = load(whole, "mtp")
    assert answers(Drafting(runner, method="mtp").engine, runner.info.vocab_size, SAMPLINGS) == expected
    assert (runner.layout.num_draft_layers, runner.layout.model_id) == (1, plain.layout.model_id)


@pytest.mark.parametrize(
    ("method", "isa"),
    [
        ("eagle3", "auto"),
        ("mtp", "none"),
        pytest.param("eagle3", "none", marks=pytest.mark.long),
        pytest.param("mtp", "auto", marks=pytest.mark.long),
    ],
)
def test_entries_are_those_that_a_prompt_of_these_tokens_has(method: str, isa: str) -> None:
    """After chunks, accepted and rejected drafts, steps without drafts, preemption and blocks of the prefix cache."""
    runner = load(TINY, method, HEADS[method], cpu_isa=isa, kv_memory_bytes=1200 << 10)
    check_entries(runner, load(TINY, method, HEADS[method], cpu_isa=isa), method)


def check_entries(runner: ModelRunner, alone: ModelRunner, method: str) -> None:
    """runner: has so few blocks that sequences are preempted; alone: computes each sequence as a prompt."""
    engine, vocab_size = Drafting(runner, chunk_tokens=40, method=method).engine, runner.info.vocab_size
    prompts = random_prompts(3, LENGTHS, vocab_size)
    for i in range(16):
        sampling = replace(SEEDED, max_tokens=60, seed=i)
        engine.submit(f"0/{i}", Request(str(i), tuple(prompts[i // 2]), sampling, 60.0), [])
    num_steps = num_compared = 0
    layers = runner.layout.num_target_layers, runner.layout.num_draft_layers
    while engine.scheduler.has_work:
        engine.step()
        num_steps += 1
        if num_steps % 13:
            continue
        for sequence in list(engine._sequences.values()):
            num = sequence.num_draft_computed
            if num < 2:
                continue
            own = draft_kv(runner, sequence, *layers)
            check = Engine(alone, SchedulerConfig(), prefix_cache=False)
            check.submit("0/x", Request("x", tuple(sequence.token_ids[: num + 1]), GREEDY, 60.0), [])
            check.step()
            (reference,) = check._sequences.values()
            assert reference.num_draft_computed == num
            # The entry of a shared block's last token may have another sequence's next token.
            is_inner = torch.arange(num) % 16 != 15
            expected = draft_kv(alone, reference, *layers)
            torch.testing.assert_close(own[:, :, is_inner], expected[:, :, is_inner], atol=5e-4, rtol=5e-3)
            num_compared += 1
    assert_clean(engine)
    assert num_compared > 10
    assert engine.scheduler.num_preemptions > 0


def test_a_sequence_whose_hidden_states_were_never_seen_is_not_drafted_for() -> None:
    runner = load(TINY, "eagle3", HEADS["eagle3"])
    engine = Drafting(runner, method="eagle3").engine
    prompt = tuple(random_prompts(3, [100], runner.info.vocab_size)[0])
    engine.submit("0/0", Request("0", prompt, GREEDY, 60.0, speculates=False), [])
    run(engine)
    engine.submit("0/1", Request("1", prompt, GREEDY, 60.0), [])  # its blocks hold no entries
    run(engine)
    assert not engine.check_integrity().load.drafts
    other = tuple(random_prompts(4, [100], runner.info.vocab_size)[0])
    for key in ("0/2", "0/3"):  # the second one's blocks do
        before = sum(each.num_drafted for each in engine.check_integrity().load.drafts)
        engine.submit(key, Request(key, other, GREEDY, 60.0), [])
        run(engine)
        assert sum(each.num_drafted for each in engine.check_integrity().load.drafts) > before
    assert_clean(engine)


def test_heads_that_do_not_fit_are_refused_by_name(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    eagle3, mtp = HEADS["eagle3"], HEADS["mtp"]
    with pytest.raises(ConfigError, match=r"tiny_eagle3.* set speculation to eagle3"):
        load(TINY, "mtp", eagle3)
    with pytest.raises(ConfigError, match=r"tiny_mtp.* set speculation to mtp"):
        load(TINY, "eagle3", mtp)
    with pytest.raises(CheckpointError, match=r"no MTP module"):
        load(TINY, "mtp")
    with pytest.raises(ConfigError, match="eagle_aux_hidden_state_layer_ids must be distinct layers of the target"):
        load(checkpoint_of("llama"), "eagle3", eagle3)
    short = tmp_path / "short"
    shutil.copytree(eagle3, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    with pytest.raises(ConfigError, match="128 positions, fewer than max_context_tokens=256"):
        load(TINY, "eagle3", short)
    (short / "config.json").write_text(json.dumps(config | {"architectures": ["Eagle7"]}))
    with pytest.raises((UnsupportedArchitecture, CheckpointError), match="short"):
        load(TINY, "eagle3", short)
    with pytest.raises(ConfigError, match="draft_model is missing: speculation eagle3 needs it"):
        WorkerConfig.of(TINY, speculation="eagle3")


def test_dot_and_rows_side_by_side(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    """Torch computes a head whose sizes the kernels do not have, beside a target that they compute."""
    path = checkpoint_of("llama")
    plain = load(path, None)
    if plain.layout.packing != DOT:
        pytest.skip("torch computes here")
    config = eagle3_config("flat", layer={"head_dim": 24})
    runner = load(path, "eagle3", make_eagle3(tmp_path / "head", config, 3))
    groups = runner.layout.layer_groups(0, runner.layout.num_layers)
    assert [(len(of.layers), of.uniform.packing) for of in groups] == [(3, DOT), (1, ROWS)]
    expected = answers(Engine(plain, SchedulerConfig()), plain.info.vocab_size, SAMPLINGS)
    assert answers(Drafting(runner, method="eagle3").engine, runner.info.vocab_size, SAMPLINGS) == expected
