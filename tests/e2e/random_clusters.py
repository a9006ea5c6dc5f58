"""Clusters of random settings under random calls: answers are those of one worker that is asked one call at a time.

    python -m tests.e2e.random_clusters --start 0 --seeds 20

A seed decides a family of models, its cluster (pools, ranks, blocks, chunks, drafts, transports, little memory), the
settings on which answers depend (dtype, weights and KV in few bits), a hundred calls with all kinds of sampling, and
whether a worker is killed meanwhile, and connections between processes break (as root). Some calls are streams that
their clients leave. Afterwards no block may be held.

With compiled kernels answers are equal, log-probabilities too. Where torch computes, or the CUDA engine on a fake
device, last bits depend on the batch: tokens are equal in float32 at full width; else only errors are looked for.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copy
from typing import Any

import httpx

from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.compiled_limits import why_torch

from ..support.checkpoints import make_checkpoint
from ..support.cluster_harness import Served, serving, wait_until
from ..support.connections import between, can_cut, cut

Call = dict[str, Any]
ROOT = Path(__file__).parent.parent.parent
TINY = ROOT / "examples" / "tiny"
VOCABULARY = 2048  # tiny's, whose tokenizer all have
CONTEXT = 800  # tokens, where memory is little
LIMIT_S = 240.0
AT_ONCE = 16
CUT_EACH = 20  # calls
NUM_LEFT = 20  # streams that their clients leave
FAMILIES = (
    *("tiny",) * 3,  # whose KV may have any dtype
    *("llama", "mistral", "mixtral", "qwen2", "qwen3moe", "qwen3-windows", "gptoss", "gemma2", "gemma3"),
    *("olmo2", "phi3", "phi3-long", "deepseek-v2", "deepseek-v3", "gemma4", "gemma4-moe"),
)
POOLS = (
    "--prefill 1 --decode 1",
    "--prefill 2 --decode 1",
    "--prefill 1 --decode 2",
    "--prefill 0 --decode 0 --mixed 2",
    "--prefill 1 --decode 1 --mixed 1",
)
REGEXES = ("[a-z ]{5,40}", "(yes|no|maybe)( (yes|no))*", r'\{"name": "[A-Z][a-z]+", "age": [0-9]{1,3}\}')
# A field, its values, and in how many of 100 calls it is.
FIELDS: tuple[tuple[str, Sequence[Any], int], ...] = (
    ("top_p", (0.9,), 30),
    ("top_k", (20,), 20),
    ("min_p", (0.05,), 15),
    ("repetition_penalty", (1.2,), 20),
    ("presence_penalty", (0.5,), 20),
    ("frequency_penalty", (0.5,), 20),
    ("ignore_eos", (True,), 40),
    ("logprobs", (0, 1, 5), 30),
    ("prompt_logprobs", (0, 2), 10),
    ("n", (2, 3), 15),
    ("logit_bias", ({"300": 5, "700": 5, "1100": -5},), 10),
    ("stop", ([" the", "e"],), 10),
)
GRAMMARS: tuple[Call, ...] = (
    {"bad_words": ["the", "a"]},
    *({"regex": regex} for regex in REGEXES),
    {"allowed_token_ids": [300, 301, 302, 700, 900, 1500]},
)


@dataclass(frozen=True)
class Drawn:
    """What a seed decides."""

    family: str
    same: tuple[str, ...]  # flags on which answers depend
    flags: tuple[str, ...]
    calls: tuple[Call, ...]
    left: tuple[Call, ...]  # of these: asked as streams, whose clients leave
    killed: int | None  # number of a worker that is killed after a quarter of the answers, modulo that of workers
    kv_dtype: str
    block_size: int
    ranks: int
    has_kernels: bool  # compiled ones, where they know the model
    is_full_width: bool  # float32, as weights and KV too
    is_cut: bool  # all connections break, a few times

    @classmethod
    def of(cls, seed: int, num_calls: int = 100) -> "Drawn":
        rng = random.Random(seed)
        family = rng.choice(FAMILIES)
        has_latents = family.startswith("deepseek")
        is_fake, has_torch = rng.random() < 0.3 and not has_latents, rng.random() < 0.2
        isa = "none" if is_fake or has_torch else rng.choice(("auto", "portable", "avx2"))
        dtype = rng.choice(("bfloat16", "float32"))
        few_bits = () if has_latents else ("int8", "fp8")
        few_bits += ("int4", "kivi") if family == "tiny" else ()  # whose heads have 32 numbers; the others' have 16
        kv_dtype = rng.choice(("auto", "auto", *few_bits))
        ranks = 1 if is_fake else rng.choice((1, 1, 1, 2))
        quantize = rng.choice((None, None, "int8", "w8a8", *(("int4",) if ranks == 1 else ())))  # of 32 inputs each
        same = ["--cpu-isa", isa, "--dtype", dtype, "--kv-dtype", kv_dtype, "--tensor-parallel", str(ranks)]
        same += ["--quantize", quantize] if quantize else []
        block_size = 32 if kv_dtype == "kivi" else rng.choice((16, 16, 32, 64))
        same += ["--block-size", str(block_size)] if kv_dtype == "kivi" else []
        if has_little := rng.random() < 0.4:
            same += ["--max-context-tokens", str(CONTEXT)]
        flags = [*rng.choice(POOLS).split(), "--block-size", str(block_size)]
        flags += ["--speculation", rng.choice(("none", "ngram", "suffix"))]
        num_bytes = (1280 if family == "tiny" else 512) * (2 if dtype == "float32" else 1)  # of a token, about
        little = str(2 * CONTEXT * num_bytes * ranks)  # few sequences: others wait
        flags += ["--kv-memory", little] if has_little else []
        flags += ["--device", "fake"] if is_fake else []
        for choice, chance in (
            (("--chunk-tokens", "16"), 0.25),
            (("--chunk-tokens", "64"), 0.25),
            (("--max-running", "4"), 0.3),
            (("--kv-axis-order", "layer"), 0.3),
            (("--layer-groups", "2"), 0.3),
            (("--transport", rng.choice(("grpc", "nixl"))), 0.2),
            (("--verify-kv",), 0.2),
            (("--no-prefix-cache",), 0.2),
            (("--no-look-ahead",), 0.2),
            (("--no-cuda-graphs",), 0.2),
        ):
            flags += choice if rng.random() < chance else ()
        prefixes = [_ids(rng, n) for n in (0, 16, 40, 100)]
        calls = tuple(_call(rng, prefixes) for _ in range(num_calls))
        return cls(
            family,
            tuple(same),
            tuple(flags),
            calls,
            tuple(rng.sample(calls, min(NUM_LEFT, num_calls))),
            rng.randrange(6) if rng.random() < 0.5 else None,
            kv_dtype,
            block_size,
            ranks,
            isa != "none",
            dtype == "float32" and kv_dtype == "auto" and quantize is None,
            rng.random() < 0.5,
        )


def _ids(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(5, VOCABULARY) for _ in range(num)]


def _call(rng: random.Random, prefixes: Sequence[list[int]]) -> Call:
    tail = _ids(rng, num := rng.choice((1, 3, 17, 40, 150, 400)))
    if rng.random() < 0.4:  # text that repeats itself, for drafts
        tail = (tail[:7] * num)[:num]
    call: Call = {
        "prompt": rng.choice(prefixes) + tail,
        "seed": rng.randrange(1 << 30),
        "max_tokens": rng.choice((1, 2, 8, 30, 70)),
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.0, 1.5)),
        "return_token_ids": True,
    }
    for name, values, percent in FIELDS:
        if rng.random() * 100 < percent:
            call[name] = rng.choice(values)
    return call | (rng.choice(GRAMMARS) if rng.random() < 0.25 else {})


def checkpoint(folder: Path, family: str) -> Path:
    """Random weights of the family, with tiny's tokenizer."""
    if family == "tiny":
        return TINY
    sizes = {"vocab_size": VOCABULARY} | ({"vocab_size_per_layer_input": VOCABULARY} if family == "gemma4" else {})
    path = make_checkpoint(folder / family, family, 1, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (TINY / name).exists():
            copy(TINY / name, path)
    return path


async def _answer(client: httpx.AsyncClient, call: Call) -> Any:
    response = await client.post("/v1/completions", json=call)
    if response.status_code != 200:
        return response.text
    body = response.json()
    return [body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"], body["choices"]]


async def _leave(client: httpx.AsyncClient, call: Call) -> None:
    """Read the beginning of a long stream. Raises AssertionError where there is an error in it."""
    body = {name: value for name, value in call.items() if name != "prompt_logprobs"}
    body |= {"stream": True, "max_tokens": 200, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = response.aiter_lines()
        for _ in range(call["max_tokens"] // 4):
            line = await anext(lines, "")
            assert not line.startswith('data: {"error"'), line


async def _ask(served: Served, drawn: Drawn, at_once: int, *, is_alone: bool) -> list[Any]:
    """All answers, in the order of the calls; an error is a text."""
    limit = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=served.http_address, timeout=LIMIT_S) as client, asyncio.TaskGroup() as group:

        async def one(call: Call, is_left: bool = False) -> Any:
            async with limit:
                return await (_leave if is_left else _answer)(client, call)

        asked = [group.create_task(one(call)) for call in drawn.calls]
        if not is_alone:
            for call in drawn.left:
                group.create_task(one(call, True))
            await _harm(served, drawn, asked)
    return [task.result() for task in asked]


async def _harm(served: Served, drawn: Drawn, asked: Sequence[asyncio.Task[Any]]) -> None:
    """Do to the cluster what is drawn, while it answers."""
    found, can = await asyncio.to_thread(served.status), can_cut()
    pids = [worker["pid"] for worker in found["workers"]]
    fronts = [router[port] for router in found["routers"] for port in ("http_port", "grpc_port")]
    for number, answer in enumerate(asyncio.as_completed(asked)):
        await answer
        if number == len(asked) // 4 and drawn.killed is not None:
            os.kill(pids[drawn.killed % len(pids)], signal.SIGKILL)
        if number % CUT_EACH == CUT_EACH // 2 and drawn.is_cut and can:
            cut(between(served.family(), without=fronts))


def differences(drawn: Drawn, found: Sequence[Any], expected: Sequence[Any], *, is_exact: bool) -> Iterator[str]:
    """Yield a text for each call whose answer is not as it must be. is_exact: to the bit."""
    for call, answer, right in zip(drawn.calls, found, expected, strict=True):
        if isinstance(answer, str) or isinstance(right, str):  # an error: no call is wrong
            is_same = False
        elif is_exact:
            is_same = answer == right
        else:
            is_same = not drawn.is_full_width or _tokens(answer) == _tokens(right)
        if not is_same:
            yield f"{ {k: v for k, v in call.items() if k != 'prompt'} }: {answer} and not {right}"


def _tokens(answer: Any) -> list[tuple[list[int], str]]:
    return [(choice["token_ids"], choice["finish_reason"]) for choice in answer[2]]


def _is_whole(status: dict[str, Any], num_workers: int) -> bool:
    """Whether a killed worker has a successor."""
    phases = [worker["phase"] for worker in status["workers"]]
    return phases == ["ready"] * num_workers and not status["problems"]


def run(seed: int, folder: Path, num_calls: int = 100) -> list[str]:
    """Raises AssertionError where blocks are held afterwards, or a cluster does not start; for errors in streams a
    group of them."""
    drawn = Drawn.of(seed, num_calls)
    model = checkpoint(folder, drawn.family)
    unknown = why_torch(load_spec(model), drawn.block_size, drawn.ranks, kv_dtype=drawn.kv_dtype)
    (config := folder / "cluster.yaml").write_text("dial: false\n")  # pools keep their parts, so that KV is handed off
    with serving(folder / "home", "--config", str(config), *drawn.same, *drawn.flags, model=str(model)) as served:
        num_workers = len(served.status()["workers"])
        found = asyncio.run(_ask(served, drawn, AT_ONCE, is_alone=False))
        wait_until(lambda: _is_whole(served.status("check"), num_workers), LIMIT_S)
        served.assert_nothing_is_held()
    alone = ("--prefill", "0", "--decode", "0", "--mixed", "1", "--no-prefix-cache")
    with serving(folder / "alone", *drawn.same, *alone, model=str(model)) as served:
        expected = asyncio.run(_ask(served, drawn, 1, is_alone=True))
    return list(differences(drawn, found, expected, is_exact=drawn.has_kernels and unknown is None))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--start", type=int, default=0)
    args = parser.parse_args()
    for seed in range(args.start, args.start + args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            different = run(seed, Path(folder))
        drawn = Drawn.of(seed)
        print(f"seed {seed}: {drawn.family} {' '.join(drawn.same + drawn.flags)}: {len(different)} differ", flush=True)
        if different:
            print(*(text[:2000] for text in different), sep="\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
