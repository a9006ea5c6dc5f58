"""`diptych plan --memory`: its figures equal those of the loaded model, and what does not fit is refused by name."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diptych.cluster.cli.main import app
from diptych.cluster.preflight.checks import check_head, resolve_model
from diptych.cluster.preflight.memory_plan import Memory, Parallelism, PlannedDraft, kv_formula, plan_memory
from diptych.workers.common.errors import ConfigError, InsufficientMemory
from diptych.workers.config.worker_config import DEVICE_BATCH_TOKENS, WorkerConfig
from diptych.workers.execution.draft.draft_source import DraftSource
from diptych.workers.execution.draft.guarded_draft import GuardedDraft
from diptych.workers.execution.model_runner import ModelRunner, _check_memory
from diptych.workers.kv.layout import ROWS, KVLayout
from diptych.workers.models.checkpoint.weights import DTYPES, Checkpoint, DecoderWeights
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import AttentionSpec
from diptych.workers.models.plan.formats import DECODED_ON_GPUS
from diptych.workers.models.plan.kept_numbers import NONE
from diptych.workers.models.plan.kv_plan import blocks_at_once, layout_of, plan_num_blocks
from diptych.workers.models.plan.sharding import WHOLE, Share
from diptych.workers.models.plan.weight_bytes import weight_bytes

from ...support.checkpoints import make_checkpoint
from ...support.tensors import tensors_of

CPU = torch.device("cpu")
ROOMY = Memory(1 << 30, 0.5)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plan") / "llama", "llama", 0)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plan") / "qwen3", "qwen3", 0)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plan") / "gemma3", "gemma3", 0)


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plan") / "gemma4", "gemma4", 0)


def loaded_bytes(path: Path, dtype: str, share: Share) -> int:
    """Of the tensors that a rank really makes."""
    with Checkpoint(path, load_spec(path)) as checkpoint:
        reader = checkpoint.reader(DTYPES[dtype], CPU, share=share)
        layers = [fields.as_layer() for fields in reader.layers()]
        outer = reader.outer()
        tensors = [outer.fused(field) for field in DecoderWeights.__slots__]
    tensors += [getattr(layer, name) for layer in layers for name in layer.__slots__]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma4"])
def test_weights_are_those_that_are_loaded(family: str, size: int, dtype: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(family)
    found = plan_memory(load_spec(path), Parallelism(dtype, tensor_parallel=size), ROOMY)
    assert found.first.weight_bytes == loaded_bytes(path, dtype, Share(0, size))
    if size > 1:
        assert found.other is not None and found.other.weight_bytes == loaded_bytes(path, dtype, Share(1, size))


def test_what_fits_is_what_a_worker_makes(llama: Path) -> None:
    spec = load_spec(llama)
    found = plan_memory(spec, Parallelism(), Memory(1 << 22, 0.5), max_context_tokens=64)
    layout = KVLayout("bfloat16", 16, spec.num_layers, spec.kv.num_heads, spec.kv.dim, "test")
    free = (1 << 22) - found.first.weight_bytes
    assert found.first.free_bytes == free
    num_blocks = plan_num_blocks(layout, 64, free // 2)
    assert (found.num_tokens, found.first.kv_bytes) == (num_blocks * 16, num_blocks * layout.block_bytes)
    assert found.first.num_sequences(50, 16) == num_blocks * 16 // 64


def test_ranks_on_gpus_have_whole_pieces_of_memory(llama: Path) -> None:
    """And weights in as many bits as a CPU's."""
    spec, memory = load_spec(llama), Memory(100_000_000, 0.5)
    how = Parallelism("float32", "int8", 2)
    on_cpu, on_gpus = (plan_memory(spec, replace(how, on_gpus=on), memory, 48) for on in (False, True))
    wanted = (memory.rank_bytes - on_gpus.first.weight_bytes) // 2
    assert on_gpus.first.weights == on_cpu.first.weights
    assert on_cpu.full_size_because is on_gpus.full_size_because is None
    layout = layout_of(spec, "float32", 16, tensor_parallel=2)
    num_blocks = plan_num_blocks(layout, 48, 2 * wanted, blocks_at_once(layout, 2 << 20))
    assert (on_gpus.first.kv_bytes, on_gpus.num_tokens) == (num_blocks * layout.rank_block_bytes, num_blocks * 16)
    assert on_gpus.first.kv_bytes % (2 << 20) == 0 != on_cpu.first.kv_bytes % (2 << 20)


@pytest.mark.parametrize(
    ("size", "quantize", "kv_dtype"),
    [(1, None, "auto"), (2, None, "auto"), (8, "int8", "auto"), (1, None, "int8"), (2, None, "fp8"), (1, None, "int4")],
)
def test_the_formula_gives_the_bytes(llama: Path, size: int, quantize: str | None, kv_dtype: str) -> None:
    spec, how = load_spec(llama), Parallelism("float32", quantize, size, kv_dtype=kv_dtype)
    product, source = kv_formula(spec, how)
    dim = spec.kv.dim
    size = dim // 2 if kv_dtype == "int4" else dim
    product = product.replace(f"({size} + 2 of a scale)", str(size + 2))
    numbers = [int(word) for word in product.replace("(", " ").split() if word.isdecimal()]
    token_bytes = plan_memory(spec, how, ROOMY).token_bytes
    assert token_bytes == torch.tensor(numbers).prod()
    if kv_dtype != "auto":
        full = plan_memory(spec, replace(how, kv_dtype="auto"), ROOMY).token_bytes
        assert token_bytes * 4 * dim == full * (size + 2)
    assert "num_key_value_heads" in source


def test_the_formula_of_kivi_and_its_tail() -> None:
    """As a worker reserves them: two steps' tokens, and two blocks of each running sequence, at full width."""
    spec = load_spec(Path(resolve_model("tiny")))
    how = Parallelism("float32", block_size=32, kv_dtype="kivi")
    product, _ = kv_formula(spec, how)
    assert product == "2 (key, value) x 5 layers x 2 KV heads x (16 + 4 of scales and least numbers) x 1 byte"
    found, full = (plan_memory(spec, each, ROOMY) for each in (how, replace(how, kv_dtype="auto")))
    assert found.token_bytes * 32 == full.token_bytes * 5
    assert found.tail_bytes == 2 * (768 // 32 + 256) * 32 * full.token_bytes
    assert full.tail_bytes == 0 and found.first.free_bytes == full.first.free_bytes - found.tail_bytes
    on_gpus = plan_memory(spec, replace(how, on_gpus=True, tensor_parallel=2), ROOMY)
    step_tokens = DEVICE_BATCH_TOKENS["cuda"]
    assert on_gpus.tail_bytes == 2 * (step_tokens // 32 + 256) * 32 * full.token_bytes // 2


def test_the_formula_sums_over_unlike_layers_that_keep_kv(llama: Path) -> None:
    spec = load_spec(llama)
    attention = spec.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    wide = replace(attention, num_kv_heads=1, head_dim=64)
    shares = replace(attention, kv_from=0)
    layers = tuple(replace(spec.layers[0], attention=of) for of in (attention, wide, attention, shares))
    spec, how = replace(spec, layers=layers), Parallelism("float32", tensor_parallel=2)
    heads, dim = attention.num_kv_heads // 2, attention.head_dim
    product, source = kv_formula(spec, how)
    sizes = f"(2 layers x {heads} KV heads x {dim} + 1 layers x 1 KV heads x 64)"
    assert product == f"2 (key, value) x {sizes} x 4 bytes"
    assert source.endswith("of each kind of layer; the other 1 layers read the KV of these")
    assert plan_memory(spec, how, ROOMY).token_bytes == 2 * (2 * heads * dim + 64) * 4


def test_quantised_weights_take_less(llama: Path) -> None:
    spec = load_spec(llama)
    plain, int8, int4 = (
        plan_memory(spec, Parallelism(quantize=of), ROOMY).first.weights for of in (None, "int8", "int4")
    )
    assert plan_memory(spec, Parallelism(quantize="int8"), ROOMY).full_size_because is None
    assert plain["embeddings"] == int8["embeddings"] == int4["embeddings"]
    assert plain["MLP"] > 1.5 * int8["MLP"] > 1.5 * int4["MLP"]
    fp8, mxfp4 = (plan_memory(spec, Parallelism(quantize=of), ROOMY).first.weights for of in ("fp8", "mxfp4"))
    assert fp8 == int8
    # A scale of four bytes for 32 numbers of half a byte.
    mlp = spec.layers[0].mlps[0].intermediate_size * spec.hidden_size * 3 * spec.num_layers
    assert mxfp4["MLP"] == mlp * 20 // 32


@pytest.mark.parametrize(
    ("arch", "changes", "because"),
    [
        ("deepseek-v2", {}, "latent attention"),
        ("llama", {"block_size": 24}, "block_size 24"),
        ("mixtral", {"tensor_parallel": 2, "expert_parallel": 2}, "hold whole"),
    ],
)
def test_weights_that_torch_computes_with_are_counted_at_full_size(
    tmp_path: Path, arch: str, changes: dict[str, int], because: str
) -> None:
    spec = load_spec(make_checkpoint(tmp_path / arch, arch, 0))
    plain, int8 = (plan_memory(spec, Parallelism(quantize=of, **changes), ROOMY) for of in (None, "int8"))
    assert int8.first.weights == plain.first.weights
    assert plain.full_size_because is None and because in (int8.full_size_because or "")


def test_ranks_with_whole_experts(tmp_path: Path) -> None:
    """7 experts over two ranks: 3 and 4, of an inner size that two ranks could not share."""
    path = make_checkpoint(tmp_path / "mixtral", "mixtral", 4, num_local_experts=7, intermediate_size=33)
    found = plan_memory(load_spec(path), Parallelism("float32", None, 2, expert_parallel=2), ROOMY)
    expert, router = 3 * 33 * 64 * 4, 7 * 64 * 4
    assert found.other is not None
    assert found.first.weights["experts"] == 3 * (3 * expert + router)
    assert found.other.weights["experts"] == 3 * (4 * expert + router)
    for size in (3, 1):
        with pytest.raises(ConfigError, match="1 or tensor_parallel"):
            plan_memory(load_spec(path), Parallelism(tensor_parallel=size, expert_parallel=2), ROOMY)


def test_a_draft_takes_what_a_worker_gives_it() -> None:
    """Its weights, and its KV in the same blocks."""
    tiny, draft = (load_spec(Path(resolve_model(name))) for name in ("tiny", "tiny_draft"))
    found = plan_memory(tiny, Parallelism(), ROOMY, draft=PlannedDraft(draft))
    alone, own = plan_memory(tiny, Parallelism(), ROOMY), plan_memory(draft, Parallelism(), ROOMY)
    assert found.first.weights == alone.first.weights | {"draft model": own.first.weight_bytes}
    assert found.token_bytes == alone.token_bytes + own.token_bytes
    memory = 1 << 20
    config = WorkerConfig.of(resolve_model("tiny"), kv_memory_bytes=memory, max_context_tokens=64)
    runner = ModelRunner.load(config.changed(speculation="draft", draft_model=resolve_model("tiny_draft")))
    assert runner.layout.block_bytes == found.token_bytes * 16
    fits = plan_memory(tiny, Parallelism(), replace(ROOMY, kv_bytes=memory), 64, PlannedDraft(draft)).num_tokens
    assert fits == runner.memory.num_blocks * 16 < plan_memory(tiny, Parallelism(), ROOMY, 64).num_tokens
    on_gpu = plan_memory(tiny, Parallelism(on_gpus=True), ROOMY, draft=PlannedDraft(draft))
    assert on_gpu.first.weights["draft model"] == own.first.weight_bytes


def test_ranks_share_a_draft_or_the_first_has_it_whole() -> None:
    """In every rank's blocks there is room for what the first one keeps."""
    tiny, draft = (load_spec(Path(resolve_model(name))) for name in ("tiny", "tiny_draft"))
    two, planned = Parallelism(tensor_parallel=2), PlannedDraft(draft)
    alone, half = plan_memory(tiny, two, ROOMY), plan_memory(draft, two, ROOMY)
    whole = plan_memory(draft, Parallelism(), ROOMY)
    shared = plan_memory(tiny, two, ROOMY, draft=planned)
    assert shared == plan_memory(tiny, replace(two, draft_tensor_parallel=2), ROOMY, draft=planned)
    assert shared.other is not None and half.other is not None
    assert shared.first.weights["draft model"] == half.first.weight_bytes
    assert shared.other.weights["draft model"] == half.other.weight_bytes
    assert shared.token_bytes == alone.token_bytes + half.token_bytes
    first = plan_memory(tiny, replace(two, draft_tensor_parallel=1), ROOMY, draft=planned)
    assert first.other is not None and "draft model" not in first.other.weights
    assert first.first.weights["draft model"] == whole.first.weight_bytes
    assert first.token_bytes == alone.token_bytes + whole.token_bytes
    for how, same in ((two, shared), (replace(two, draft_tensor_parallel=1), first)):
        on_gpus = plan_memory(tiny, replace(how, on_gpus=True), ROOMY, draft=planned)
        assert on_gpus.token_bytes == same.token_bytes and on_gpus.other is not None and same.other is not None
        assert on_gpus.first.weights == same.first.weights and on_gpus.other.weights == same.other.weights
    with pytest.raises(ConfigError, match=r"draft_tensor_parallel must be 1 or tensor_parallel \(2\), got 3"):
        plan_memory(tiny, replace(two, draft_tensor_parallel=3), ROOMY, draft=planned)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["tiny_eagle3", "tiny_mtp"])
def test_a_head_takes_what_a_worker_gives_it(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights and its copies of the target's, and its KV in the same blocks."""
    target, folder, method = resolve_model("tiny"), Path(resolve_model(name)), name.removeprefix("tiny_")
    tiny = load_spec(Path(target))
    draft = PlannedDraft(check_head(folder, Path(target), None, method).decoder, folder)
    found, alone = (plan_memory(tiny, Parallelism(dtype), ROOMY, draft=of) for of in (draft, None))
    config = WorkerConfig.of(target, dtype=dtype, kv_memory_bytes=1 << 20, max_context_tokens=64)
    config = config.changed(speculation=method, draft_model=str(folder))
    runner = ModelRunner.load(config.changed(cpu_isa="none"))
    assert runner.layout.block_bytes == found.token_bytes * 16 > alone.token_bytes * 16
    assert isinstance(runner.proposer, GuardedDraft)
    weights = runner.proposer.draft._passes._head.weights  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    num_bytes = sum(
        {id(tensor): tensor.nbytes for tensor in tensors_of(weights) if tensor.is_floating_point()}.values()
    )
    assert found.first.weights == alone.first.weights | {"draft head": num_bytes}
    lacking = alone.first.weight_bytes + num_bytes - 1
    monkeypatch.setattr("diptych.workers.execution.model_runner.available_bytes", lambda _device: lacking)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(InsufficientMemory, match=rf"{num_bytes:,} of them for what drafts"):
        ModelRunner.load(config)


def test_a_context_is_as_long_as_a_workers(llama: Path) -> None:
    spec = replace(load_spec(llama), max_position_embeddings=128, longest_context=512)
    assert plan_memory(spec, Parallelism(), ROOMY).max_context_tokens == 128
    assert plan_memory(spec, Parallelism(), ROOMY, max_context_tokens=512).max_context_tokens == 512
    with pytest.raises(ConfigError, match="max_context_tokens=513 is more than the model's 512"):
        plan_memory(spec, Parallelism(), ROOMY, max_context_tokens=513)


def test_workers_that_share_experts(tmp_path: Path) -> None:
    """7 experts over two: 3 and 4; all else each has whole."""
    spec = load_spec(make_checkpoint(tmp_path / "mixtral", "mixtral", 4, num_local_experts=7, intermediate_size=33))
    whole, shared = (plan_memory(spec, Parallelism("float32", data_parallel=num), ROOMY) for num in (1, 2))
    expert, router = 3 * 33 * 64 * 4, 7 * 64 * 4
    assert shared.other is not None and shared.token_bytes == whole.token_bytes
    assert shared.first.weights == whole.first.weights | {"experts": 3 * (3 * expert + router)}
    assert shared.other.weights == whole.first.weights | {"experts": 3 * (4 * expert + router)}
    drafting = plan_memory(spec, Parallelism("float32", data_parallel=2), ROOMY, draft=PlannedDraft(spec))
    each = {"draft model": whole.first.weight_bytes}  # by itself, with all experts
    assert drafting.first.weights == shared.first.weights | each
    assert drafting.other is not None and drafting.other.weights == shared.other.weights | each
    on_gpus = plan_memory(spec, Parallelism("float32", data_parallel=2, on_gpus=True), ROOMY)
    assert on_gpus.other is not None
    assert (on_gpus.first.weights, on_gpus.other.weights) == (shared.first.weights, shared.other.weights)
    with pytest.raises(ConfigError, match="data_parallel=2 needs tensor_parallel=1"):
        plan_memory(spec, Parallelism(tensor_parallel=2, data_parallel=2), ROOMY)
    with pytest.raises(ConfigError, match="use 1 to 7"):
        plan_memory(spec, Parallelism(data_parallel=8), ROOMY)


def test_ranks_that_cannot_share_it_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="attention heads"):
        plan_memory(load_spec(llama), Parallelism(tensor_parallel=3), ROOMY)
    with pytest.raises(ConfigError, match="more than the model's"):
        plan_memory(load_spec(llama), Parallelism(), ROOMY, max_context_tokens=1 << 20)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--rank-memory", "1GiB"], 0, "fits: "),
        (["--rank-memory", "1GiB", "--tensor-parallel", "2"], 0, "each other"),
        (["--rank-memory", "1000"], 2, "use more ranks (--tensor-parallel), --quantize, or more memory"),
        (["--rank-memory", "1000", "--device", "cuda"], 2, "use more ranks (--tensor-parallel), --quantize"),
        (["--rank-memory", "100MB", "--kv-memory", "200MB"], 2, "--kv-memory needs"),
        (["--rank-memory", "1GiB", "--kv-memory", "100000"], 2, "less than one context"),
        (["--rank-memory", "much"], 2, "--rank-memory: 'much' is not a size"),
        (["--device", "cuda", "--tensor-parallel", "2", "--rank-memory", "1GiB"], 0, "2 ranks, each on a GPU"),
        (["--device", "cuda"], 2, "needs --rank-memory"),
        (["--device", "gpu"], 2, "--device must be cpu or cuda"),
        (["--dtype", "int3"], 2, "--dtype must be"),
        (["--quantize", "int3"], 2, "--quantize must be"),
        (["--kv-dtype", "int8", "--rank-memory", "1GiB"], 0, "bfloat16, KV int8, one rank"),
        (["--kv-dtype", "int3"], 2, "--kv-dtype must be auto, int8, fp8, int4"),
        (["--kv-dtype", "int8", "--device", "cuda", "--rank-memory", "1GiB"], 0, "KV int8, one rank, on a GPU"),
        (
            ["--kv-dtype", "int8", "--device", "cuda", "--rank-memory", "1GiB", "--block-size", "6"],
            2,
            "kv_dtype int8 needs on a GPU a block_size that is a multiple of 4, and it is 6",
        ),
        (["--kv-memory", "1GiB", "--gpus", "H100"], 2, "--kv-memory does not work with --gpus"),
        (["--draft-model", "tiny_draft", "--rank-memory", "1GiB"], 0, "KV heads x 32 x 2 bytes of the draft model"),
        (["--speculation", "eagle3", "--draft-model", "tiny_eagle3", "--rank-memory", "1GiB"], 0, "of the draft head"),
        (["--speculation", "mtp", "--draft-model", "tiny_mtp", "--rank-memory", "1GiB"], 0, "draft head"),
        (["--speculation", "mtp"], 2, "holds no MTP module"),
        (["--speculation", "mtp", "--draft-model", "tiny_eagle3"], 2, "set speculation to eagle3"),
        (["--speculation", "eagle3"], 2, "--speculation eagle3 needs --draft-model"),
        (["--speculation", "ngram"], 2, "--speculation must be draft, eagle3 or mtp"),
        (["--draft-model", "/absent"], 2, "/absent does not exist. Give the folder of a model that drafts for"),
        (["--draft-model", "tiny_draft", "--gpus", "H100"], 2, "--draft-model does not work with --gpus"),
    ],
)
def test_the_command(flags: list[str], code: int, says: str) -> None:
    result = CliRunner().invoke(app, ["plan", "tiny", "--memory", *flags])
    assert result.exit_code == code
    assert says in result.output


def test_a_model_larger_than_memory_is_refused_before_it_is_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.workers.execution.model_runner.available_bytes", lambda _device: 1000)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    read: list[int] = []
    config = WorkerConfig.of(llama)
    with pytest.raises(InsufficientMemory, match=r"the weights take .*, but 1,000 are free.* use a smaller model$"):
        ModelRunner.load(config, lambda done, _total: read.append(done))
    assert not read


@pytest.mark.parametrize(
    ("device", "machines", "ranks"), [("cpu", 1, [0, 1, 2, 3]), ("cpu", 2, [0, 1]), ("fake", 2, [0, 1])]
)
def test_the_weights_of_the_ranks_that_share_a_memory_must_fit_it(
    llama: Path, device: str, machines: int, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its machine on a host, whose memory a fake device has, too."""
    hosts = tuple(f"127.0.0.1:{port}" for port in range(1, machines))
    spread = {"machines_per_worker": machines, "rank_hosts": hosts, "trusted_network": machines > 1}
    config = WorkerConfig.of(llama, device=device, tensor_parallel=4, **spread)
    own = [sum(weight_bytes(load_spec(llama), Share(rank, 4), "bfloat16").values()) for rank in ranks]
    monkeypatch.setattr("diptych.workers.execution.model_runner.available_bytes", lambda _device: sum(own) - 1)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(InsufficientMemory, match=f"the weights take {sum(own):,} bytes"):
        ModelRunner.load(config)


def test_each_gpu_has_room_for_the_weights_of_its_own_rank(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on CPU share one memory."""

    @dataclass
    class Loader:
        torch_device: torch.device
        gpu: object = None
        quantize: str | None = None
        keeps_numbers: bool = True

    spec, two = load_spec(llama), Parallelism(tensor_parallel=2)
    plan = plan_memory(spec, two, ROOMY)
    assert plan.other is not None
    most = max(plan.first.weight_bytes, plan.other.weight_bytes)
    monkeypatch.setattr("diptych.workers.execution.model_runner.available_bytes", lambda _device: most)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    settings = {"speculation": "draft", "draft_model": str(llama)}
    config = WorkerConfig.of(llama, tensor_parallel=2, draft_tensor_parallel=1, **settings)
    with Checkpoint(llama, spec) as checkpoint, ExitStack() as stack:
        arguments = checkpoint, Share(0, 2), Loader(torch.device("cuda", 0), gpu=object())
        _check_memory(config, *arguments, DraftSource(None, None, []))
        with pytest.raises(InsufficientMemory, match=rf", but {most:,} are free"):
            _check_memory(config, *arguments, DraftSource.open(config, spec, 64, ROWS, stack))
        on_cpu = checkpoint, Share(0, 2), Loader(CPU)
        with pytest.raises(InsufficientMemory, match=rf", but {most:,} are free"):
            _check_memory(config, *on_cpu, DraftSource(None, None, []))


def test_the_weights_of_a_draft_count_before_they_are_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = plan_memory(load_spec(llama), Parallelism(), ROOMY).first.weight_bytes
    monkeypatch.setattr("diptych.workers.execution.model_runner.available_bytes", lambda _device: 2 * num_bytes - 1)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    read: list[int] = []
    sizes = rf"take {2 * num_bytes:,} bytes in bfloat16, {num_bytes:,} of them for what drafts, but"
    with pytest.raises(InsufficientMemory, match=rf"{sizes} .* or leave out speculation$"):
        config = WorkerConfig.of(llama, speculation="draft", draft_model=str(llama))
        ModelRunner.load(config, lambda done, _total: read.append(done))
    assert not read


def test_what_gpus_decode_is_planned_at_full_size(tmp_path: Path) -> None:
    """Latents are made into keys and values by a matrix that stays as it is; all else is quantised."""
    spec = load_spec(make_checkpoint(tmp_path / "model", "deepseek-v2", 0))
    plain, packed, on_gpus = (
        weight_bytes(spec, WHOLE, "bfloat16", quantize, NONE, decoded)
        for quantize, decoded in ((None, ()), ("int8", ()), ("int8", DECODED_ON_GPUS))
    )
    assert packed["kv_b"] < on_gpus["kv_b"] == plain["kv_b"]
    assert {field for field in packed if packed[field] != on_gpus[field]} == {"kv_b"}
    planned = plan_memory(spec, Parallelism(quantize="int8", on_gpus=True), ROOMY)
    assert planned.first.weight_bytes == sum(on_gpus.values())
