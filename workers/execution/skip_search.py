"""Searches for the layers that a model should skip where it drafts for itself, and writes them to a file.

    python -m diptych.workers.execution.skip_search MODEL OUT.json [--prompts FILE] [--num-tokens 64] ...

Text is what the model itself says: greedy answers to the lines of a file (text, or a JSON string), or to random tokens.
For a set of skipped layers, the share a of tokens is measured that the model says without them too, and the time c of a
pass without them beside one with all. Drafts of k tokens then yield, beside none,

    (1 + a + a² + ... + a^k) / (1 + k c)  times the tokens per second      (Leviathan et al. 2023, theorem 3.8)

for the best k. From no layer on, the layer with which this grows most is skipped too, until it grows no more (Zhang et
al. 2024 search by Bayesian optimisation). As when drafting, a token is computed after KV of the whole model: an
answer's tokens are computed from the last to the first, so that what one leaves is read by no other.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ..common.request import Request, SamplingParams
from ..config.worker_config import WorkerConfig
from ..core.drafting import MAX_DRAFT_TOKENS
from ..core.sequence import Sequence as Text
from ..kv.layout import blocks_for
from ..models.checkpoint.weights import Checkpoint
from ..models.families.registry import load_spec
from ..models.layers.rope import rope_tables
from ..models.plan.kv_plan import layout_of
from ..models.plan.sharding import WHOLE
from ..models.plan.skipped_layers import check_may_skip
from ..parallel.groups import Alone
from .common.backend import LoadedWeights, StepDecoder, StepResources, no_progress
from .draft.draft_steps import DraftTables, Rows
from .factory import choose_backend

NUM_RANDOM = 4  # prompts, where none are given
NUM_PROMPT = 64  # tokens of each of them
NUM_TIMED = 16  # passes


@dataclass(frozen=True, slots=True)
class Found:
    """Result of skipping some layers."""

    skipped: tuple[int, ...]
    acceptance: float  # a
    pass_share: float  # c
    speed_up: float
    num_draft_tokens: int  # with which


class SkipSearch:
    def __init__(self, weights: LoadedWeights, resources: StepResources, texts: list[Text]) -> None:
        """texts: sequences of tokens with blocks for `num_tokens` more than they have."""
        self._weights, self._resources, self._texts = weights, resources, texts
        self._block_size = resources.cache.layout.block_size
        self._whole = weights.step_decoder(resources)
        self._tables = DraftTables(texts, self._block_size)

    def answer(self, num_tokens: int) -> None:
        """Add greedy answers of the whole model to the texts."""
        starts = [0] * len(self._texts)
        for _ in range(num_tokens):
            new = [text.token_ids[start:] for text, start in zip(self._texts, starts, strict=True)]
            starts = [text.num_tokens for text in self._texts]
            for text, token_id in zip(self._texts, self._likeliest(self._whole, new, starts), strict=True):
                text.token_ids.append(token_id)
        self._pass_s = self._timed(self._whole)

    def measure(self, skipped: Sequence[int]) -> Found:
        """Measure drafts without these layers (ascending)."""
        decoder = self._weights.step_decoder(self._resources, skipped)
        num_right = num = 0
        most = max(text.num_output for text in self._texts)
        for back in range(2, most + 1):  # the last token is not the start of any
            new = [[text.token_ids[-back]] for text in self._texts]
            ends = [text.num_tokens - back + 1 for text in self._texts]
            said = self._likeliest(decoder, new, ends)
            num_right += sum(a == text.token_ids[1 - back] for a, text in zip(said, self._texts, strict=True))
            num += len(said)
        share = self._timed(decoder) / self._pass_s
        for text in self._texts:  # the whole model's KV again
            start = text.num_prompt
            self._likeliest(self._whole, [text.token_ids[start:]], [text.num_tokens], [text])
        acceptance = num_right / num
        speed_up, length = best_length(acceptance, share)
        return Found(tuple(skipped), acceptance, share, speed_up, length)

    def run(self, num_layers: int) -> list[Found]:
        """Return the best sets of one skipped layer, of two, and so on, as long as they get better."""
        found: list[Found] = []
        skipped: tuple[int, ...] = ()
        while len(skipped) < num_layers - 1:
            more = [tuple(sorted((*skipped, layer))) for layer in range(num_layers) if layer not in skipped]
            best = max((self.measure(each) for each in more), key=lambda each: each.speed_up)
            if found and best.speed_up <= found[-1].speed_up:
                break
            found.append(best)
            skipped = best.skipped
        return found

    def _likeliest(
        self, decoder: StepDecoder, new: list[list[int]], ends: list[int], texts: list[Text] | None = None
    ) -> list[int]:
        """Compute new tokens of the texts, the last of which stand before the positions `ends`. Returns what the
        decoder says after each."""
        texts = texts or self._texts
        starts = [end - len(each) for each, end in zip(new, ends, strict=True)]
        order = sorted(range(len(texts)), key=lambda i: len(new[i]) > 1)
        rows = Rows([texts[i] for i in order], [starts[i] for i in order], [new[i] for i in order], [*texts])
        logits = decoder.compute(self._tables.step(rows))
        assert logits is not None
        said = logits.argmax(dim=-1).tolist()
        return [said[order.index(i)] for i in range(len(texts))]

    def _timed(self, decoder: StepDecoder) -> float:
        """Seconds of a pass of one sequence. Leaves KV of the answer's last token."""
        text, times = self._texts[0], list[float]()
        for _ in range(NUM_TIMED):
            began = time.perf_counter()
            self._likeliest(decoder, [text.token_ids[-1:]], [text.num_tokens], [text])
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def best_length(acceptance: float, pass_share: float) -> tuple[float, int]:
    """Times as many tokens per second as without drafts, and the length of drafts that yields the most."""
    best, best_length, tokens = 1.0, 0, 1.0
    for length in range(1, MAX_DRAFT_TOKENS + 1):
        tokens += acceptance**length
        if tokens / (1 + length * pass_share) > best:
            best, best_length = tokens / (1 + length * pass_share), length
    return best, best_length


def make_texts(prompts: list[list[int]], num_tokens: int, block_size: int) -> list[Text]:
    """Sequences of these prompts, with blocks for `num_tokens` more tokens each."""
    texts: list[Text] = []
    first = 0
    for i, prompt in enumerate(prompts):
        request = Request(str(i), tuple(prompt), SamplingParams(temperature=0.0), 60.0)
        text = Text(f"0/{i}", request, [*prompt], len(prompt), deadline=0.0, arrival=i)
        end = first + blocks_for(len(prompt) + num_tokens, block_size)
        text.block_table, first = list(range(first, end)), end
        texts.append(text)
    return texts


def read_prompts(model: Path, file: Path | None, vocab_size: int) -> list[list[int]]:
    """Token ids of the lines of a file, or random ones."""
    if file is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(vocab_size, (NUM_RANDOM, NUM_PROMPT), generator=generator).tolist()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [tokenizer.encode(json.loads(line) if line.startswith('"') else line).ids for line in lines]


def search(config: WorkerConfig, prompts: Path | None, num_tokens: int) -> tuple[int, list[Found]]:
    """Search for the layers that a model of these settings should skip. Returns how many layers it has, too."""
    path = Path(config.model.model)
    spec = load_spec(path)
    check_may_skip(path, spec)
    texts = make_texts(read_prompts(path, prompts, spec.vocab_size), num_tokens, config.cache.block_size)
    most_tokens = max(text.num_tokens for text in texts) + num_tokens
    loader = choose_backend(config, spec, most_tokens).loader
    with Checkpoint(path, spec) as checkpoint:
        weights = loader.load(checkpoint, WHOLE, no_progress)
    layout = layout_of(spec, config.model.dtype, config.cache.block_size, packing=loader.packing)
    cache = loader.make_cache(layout, texts[-1].block_table[-1] + 1, 0, None)
    cos_sin = rope_tables(spec, most_tokens, loader.torch_device)
    found = SkipSearch(weights, StepResources(cache, cos_sin, Alone()), texts)
    found.answer(num_tokens)
    return spec.num_layers, found.run(spec.num_layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=Path, help="text file of prompts, a line each")
    parser.add_argument("--num-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu", help="that computes: cpu or cuda")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    config = WorkerConfig.of(args.model, dtype=args.dtype, device=args.device, threads=args.threads)
    if args.threads:
        torch.set_num_threads(args.threads)
    num_layers, found = search(config, args.prompts, args.num_tokens)
    for each in found:
        print(
            f"without layers {', '.join(map(str, each.skipped))}: {each.acceptance:.2f} accepted, a pass takes "
            f"{each.pass_share:.2f} of the whole model's; {each.speed_up:.2f} times as fast with "
            f"{each.num_draft_tokens} drafted tokens"
        )
    best = found[-1]
    args.out.write_text(
        json.dumps(
            {
                "model": str(args.model.resolve().name),
                "num_layers": num_layers,
                "skipped_layers": list(best.skipped),
                "acceptance": round(best.acceptance, 4),
                "pass_share": round(best.pass_share, 4),
                "speed_up": round(best.speed_up, 4),
            },
            indent=1,
        )
        + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
