"""The draft heads of the model that ships with the project: their training computes what the worker's heads do, and
the shipped ones draft its answers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diptych.examples.training import train_heads
from diptych.examples.training.documents import Documents
from diptych.examples.training.facts import load_facts, load_words
from diptych.examples.training.packing import Packer
from diptych.examples.training.train_heads import (
    EXAMPLES,
    LAYER_IDS,
    NUM_STEPS,
    RECIPES,
    ROWS,
    Target,
    agreement,
    load,
    losses,
    make_head,
    save,
    train,
)
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.head_specs.head_spec import HiddenState
from diptych.workers.models.heads.draft_head import DraftHead, SharedWeights
from diptych.workers.models.heads.loading import load_head

from ..support.paged_head import CPU, PagedHead

VOCABULARIES = {"eagle3": torch.arange(0, 2048, 3), "mtp": torch.arange(2048)}
MAX_BYTES = 2_000_000


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(EXAMPLES / "tiny")


@pytest.fixture(scope="module")
def chats(target: Target) -> list[tuple[list[int], int]]:
    return list(target.answers(["What is a hand-off?", "How do I start Diptych?"]))


def worker_head(folder: Path, target: Target) -> DraftHead:
    shared = SharedWeights(target.embed, target.embed)
    return load_head(folder, load_spec(EXAMPLES / "tiny"), shared, torch.float32, CPU)


def given_of(head: DraftHead, target: Target, ids: list[int]) -> Tensor:
    """[T, A], of a sequence."""
    residuals, final = target.hidden(torch.tensor([ids]))
    return final[0] if head.spec.takes is HiddenState.FINAL_NORMED else residuals[0]


def chain(paged: PagedHead, entered: Tensor, ids: list[int], entry: int) -> list[int]:
    """The NUM_STEPS greedy drafts after the token `entry` + 1, all entries before being computed."""
    paged.num_entries, drafts, hidden = entry, list[int](), entered[entry : entry + 1]
    token_id = ids[entry + 1]
    for _ in range(NUM_STEPS):
        hidden = paged.forward(torch.tensor([token_id]), hidden)
        token_id = int(paged.head.to_target(paged.head.logits(hidden).argmax(1)))
        drafts.append(token_id)
    return drafts


@pytest.mark.parametrize("kind", RECIPES)
def test_unrolled_steps_are_those_of_a_worker(kind: str, target: Target, tmp_path: Path) -> None:
    torch.manual_seed(5)
    head = make_head(kind, target, RECIPES[kind], VOCABULARIES[kind])
    for parameter in head.parameters():
        parameter.data += torch.randn_like(parameter) * 0.02  # norms, too
    save(kind, RECIPES[kind], head, target, VOCABULARIES[kind], tmp_path)
    load(kind, head, tmp_path)
    paged = PagedHead(worker_head(tmp_path, target))
    ids = torch.randint(2048, (40,)).tolist()
    given, embedded = given_of(paged.head, target, ids), target.embed[torch.tensor([ids[1:]])]
    with torch.no_grad():
        steps = list(head.unrolled(given[None, : 39 - NUM_STEPS], embedded, NUM_STEPS))
    entered = paged.head.enter(given)
    hidden = paged.forward(torch.tensor(ids[1:37]), entered[:36])
    torch.testing.assert_close(hidden, steps[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(paged.head.logits(hidden), head.logits(steps[0][0]), rtol=1e-4, atol=1e-4)
    for entry in (35, 20, 1):  # drafts from entry 20 on write over what is after it
        paged.num_entries = entry
        hidden = entered[entry : entry + 1]
        for step in range(NUM_STEPS):
            hidden = paged.forward(torch.tensor(ids[entry + 1 + step : entry + 2 + step]), hidden)
            torch.testing.assert_close(hidden[0], steps[step][0, entry], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", RECIPES)
def test_training_makes_every_step_better(kind: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    monkeypatch.setattr(
        train_heads, "ROW_TOKENS", num_tokens := 64
    )  # a quarter of the recipes', which takes as much less
    words = load_words()
    packer = Packer(Documents(load_facts(words), words), target.tokenizer, seed=5)
    vocabulary = VOCABULARIES["mtp"]
    head = make_head(kind, target, RECIPES[kind], vocabulary)
    ids, labels = packer.batch(ROWS, num_tokens + NUM_STEPS + 1, long=False)
    with torch.no_grad():
        before = list(losses(head, target, vocabulary, ids, labels))
    train(replace(RECIPES[kind], num_steps=4, warmup_steps=1), head, target, vocabulary, packer)
    with torch.no_grad():
        after = list(losses(head, target, vocabulary, ids, labels))
    assert len(before) == NUM_STEPS and all(new < old for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", RECIPES)
def test_shipped_heads_draft_the_answers(kind: str, target: Target, chats: list[tuple[list[int], int]]) -> None:
    folder = EXAMPLES / RECIPES[kind].name
    assert (folder / "model.safetensors").stat().st_size <= MAX_BYTES
    paged, right, places = PagedHead(worker_head(folder, target)), [0] * NUM_STEPS, 0
    assert kind == "mtp" or paged.head.spec.hidden_layers == LAYER_IDS
    for ids, num_prompt in chats:
        paged.num_entries = 0
        entered, first = paged.head.enter(given_of(paged.head, target, ids)), num_prompt - 1
        paged.forward(torch.tensor(ids[1 : first + 1]), entered[:first])
        for entry in range(first, len(ids) - NUM_STEPS - 1):
            drafts = chain(paged, entered, ids, entry)
            equal = [ours == theirs for ours, theirs in zip(drafts, ids[entry + 2 :], strict=False)]
            right = [n + all(equal[: i + 1]) for i, n in enumerate(right)]
            places += 1
    shares = [n / places for n in right]
    vocabulary = paged.head.to_target(torch.arange(paged.head.spec.draft_vocab_size))
    trained = make_head(kind, target, RECIPES[kind], vocabulary)
    load(kind, trained, folder)
    assert agreement(trained, target, vocabulary, chats) == pytest.approx(shares)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 256
    assert all(share > least for share, least in zip(shares, (0.5, 0.3, 0.2), strict=True)), shares
