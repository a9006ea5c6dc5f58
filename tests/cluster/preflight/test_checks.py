"""What is found wrong before anything starts."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from diptych.cluster.common.config_file import build
from diptych.cluster.preflight import checks
from diptych.cluster.preflight.checks import (
    check_checkpoint,
    check_drafts,
    check_kv,
    check_machines,
    check_model,
    check_ports,
    check_ranks,
    check_tls,
    crowding,
    resolve_model,
    resolve_paths,
)
from diptych.workers.common.errors import CheckpointError, ConfigError, PortInUse
from diptych.workers.telemetry import otlp

from ...support.checkpoints import make_checkpoint


def test_the_shipped_model_is_fine() -> None:
    check_checkpoint(Path(resolve_model("tiny")))


def test_a_folder_that_is_named_tiny_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./tiny") == str(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "no config.json"), ("{", "is not valid JSON"), ("[]", "must hold a JSON object")],
)
def test_a_folder_without_a_readable_config_is_no_checkpoint(
    tmp_path: Path, content: str | None, expected: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=expected):
        check_model(tmp_path)


def test_a_ray_of_one_machine_takes_no_workers_of_several() -> None:
    pool = {"tensor_parallel": 2, "machines_per_worker": 2}
    config = {"model": "m", "trusted_network": True, "pools": {"mixed": {}, "decode": pool}}
    with pytest.raises(
        ConfigError, match=r"pools.decode.machines_per_worker \(2\) needs a Ray of several machines, and"
    ):
        check_machines(build(config))
    config["pools"]["decode"]["replicas"] = 0
    check_machines(build(config))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file"):
        check_model(tmp_path / "model.safetensors")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("tiny"), tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"architectures": ["NobodyForCausalLM"]},
            r"NobodyForCausalLM is not supported; Diptych serves .*LlamaForCaus",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, r"must be one of compressed-tensors, gptq, .* found 'hqq'"),
        ({"hidden_act": "relu"}, "hidden_act must be one of"),
    ],
)
def test_what_config_json_tells_is_told_before_ray_starts(
    checkpoint: Path, changes: dict[str, object], expected: str
) -> None:
    edit(checkpoint / "config.json", **changes)
    with pytest.raises(CheckpointError, match=expected):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_weights_in_another_format_are_told_before_ray_starts(checkpoint: Path, name: str) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / name)
    with pytest.raises(
        CheckpointError, match=rf"weights as {name}, but only safetensors and GGUF can be read: convert"
    ):
        check_checkpoint(checkpoint)


def test_a_shard_that_the_index_names_and_that_is_missing_is_told_before_ray_starts(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match=r"00002-of-00002.safetensors does not exist, and .* names it"):
        check_checkpoint(checkpoint)


def test_a_missing_tokenizer_is_told_before_ray_starts(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        check_checkpoint(checkpoint)


def test_a_damaged_tokenizer_config_is_told_before_ray_starts(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json is not valid JSON"):
        check_checkpoint(checkpoint)


def test_ranks_that_cannot_share_the_model_are_told_before_ray_starts(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", intermediate_size=160)

    def check(quantize: str | None = None, **decode: object) -> None:
        check_ranks(build({"model": str(checkpoint), "quantize": quantize, "pools": {"prefill": {}, "decode": decode}}))

    with pytest.raises(ConfigError, match=r"pools\.decode: tensor_parallel=3 does not divide the model's 8 attention"):
        check(tensor_parallel=3)
    with pytest.raises(ConfigError, match=r"pools\.decode: quantize=int4 has one scale per 32 inputs, .* 80 inputs"):
        check("int4", tensor_parallel=2)
    check("int8", tensor_parallel=2)


def test_kv_that_cannot_be_kept_in_few_bits_is_told_before_ray_starts(tmp_path: Path) -> None:
    latent = make_checkpoint(tmp_path / "deepseek", "deepseek-v2", 0)
    pools = {"prefill": {}, "decode": {"kv_dtype": "int8"}}
    with pytest.raises(ConfigError, match=r"pools\.decode: kv_dtype int8 does not work with latent attention"):
        check_kv(build({"model": str(latent), "pools": pools}))
    check_kv(resolve_paths(build({"model": "tiny", "pools": pools})))


def test_pools_that_cannot_hand_off_to_one_of_kivi_are_told_before_ray_starts() -> None:
    def check(size: int, **prefill: object) -> None:
        pools = {"prefill": prefill, "decode": {"kv_dtype": "kivi", "block_size": size}}
        check_kv(resolve_paths(build({"model": "tiny", "pools": pools})))

    with pytest.raises(ConfigError, match=r"pools\.decode: kv_dtype kivi needs a block_size of 32, .* it is 16"):
        check(16, block_size=32)
    with pytest.raises(ConfigError, match=r"pools\.prefill: block_size of 16 is not a multiple of 32, .* to 32"):
        check(32)
    check(32, block_size=64)


def drafting(**decode: object) -> None:
    """Check a cluster of the shipped model, whose decode workers have these settings."""
    settings = {"model": "tiny", "pools": {"prefill": {}, "decode": decode}}
    check_drafts(resolve_paths(build(settings)))


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def of_another_architecture(folder: Path) -> None:
    edit(folder / "config.json", architectures=["NobodyForCausalLM"])


def of_another_size(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=2049)


def with_other_ids(folder: Path) -> None:
    file = json.loads((folder / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = file["model"]["vocab"]
    first, second = sorted(vocabulary)[500:502]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(file))


def of_few_positions(folder: Path) -> None:
    edit(folder / "config.json", max_position_embeddings=16)


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def test_what_ships_can_draft(tmp_path: Path) -> None:
    drafting(speculation="draft", draft_model="tiny_draft")
    drafting(speculation="draft", draft_model="tiny_draft", tensor_parallel=2)
    (tmp_path / "skipped.json").write_text(json.dumps({"num_layers": 5, "skipped_layers": [2]}))
    drafting(speculation="self", skipped_layers=str(tmp_path / "skipped.json"))
    drafting(replicas=1, speculation="ngram")
    drafting(speculation="eagle3", draft_model="tiny_eagle3")
    drafting(speculation="mtp", draft_model="tiny_mtp")


def test_a_head_that_cannot_draft_is_told_before_ray_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^pools.decode.draft_model: .*tiny_mtp holds a head of the kind mtp: set"):
        drafting(speculation="eagle3", draft_model="tiny_mtp")
    with pytest.raises(CheckpointError, match=r"^pools.decode.draft_model: .*tiny holds no MTP module"):
        drafting(speculation="mtp")
    folder = Path(shutil.copytree(resolve_model("tiny_eagle3"), tmp_path / "head"))
    (folder / "model.safetensors").write_bytes(b"\0\0\0\0\0\0\0\x01{}")
    with pytest.raises(CheckpointError, match=r"head/model.safetensors is not a complete safetensors file"):
        drafting(speculation="eagle3", draft_model=str(folder))
    edit(folder / "config.json", vocab_size=2049)
    with pytest.raises(ConfigError, match="a vocabulary of 2049, and LlamaForCausalLM has 2048"):
        drafting(speculation="eagle3", draft_model=str(folder))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (shutil.rmtree, r"draft does not exist. Give the folder of a model that drafts for .*tiny"),
        (without_config, r"draft has no config.json. Give the folder of a model that drafts for .*tiny"),
        (of_another_architecture, "NobodyForCausalLM is not supported"),
        (of_another_size, r"draft has a vocabulary of 2,049 tokens, and .*tiny 2,048"),
        (with_other_ids, r"draft has another vocabulary than .*tiny: the token '.*' has the id"),
        (of_few_positions, r"draft has 16 positions, fewer than max_context_tokens=\d+ of .*tiny"),
        (without_weights, r"model.safetensors does not exist"),
    ],
)
def test_a_model_that_cannot_draft_is_told_before_ray_starts(
    tmp_path: Path, change: Callable[[Path], None], expected: str
) -> None:
    folder = Path(shutil.copytree(resolve_model("tiny_draft"), tmp_path / "draft"))
    change(folder)
    with pytest.raises((ConfigError, CheckpointError), match=rf"^pools.decode.draft_model: .*{expected}"):
        drafting(speculation="draft", draft_model=str(folder))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, r"skipped.json cannot be read \(No such file"),
        ("[]", "has no num_layers and skipped_layers"),
        ('{"num_layers": 30, "skipped_layers": [2]}', r"a model of 30 layers, and .*tiny has 5"),
        ('{"num_layers": 5, "skipped_layers": [5]}', "must name some of the layers 0 to 4"),
    ],
)
def test_layers_that_cannot_be_skipped_are_told_before_ray_starts(
    tmp_path: Path, content: str | None, expected: str
) -> None:
    file = tmp_path / "skipped.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=rf"^pools.decode: skipped_layers: .*{expected}"):
        drafting(speculation="self", skipped_layers=str(file))


def test_a_draft_that_ranks_cannot_share_is_told_before_ray_starts() -> None:
    settings = {"speculation": "draft", "draft_model": "tiny_draft", "tensor_parallel": 8}
    with pytest.raises(ConfigError, match=r"^pools.decode.draft_model: .* shared by 8 ranks: .* 4 attention heads"):
        drafting(**settings)
    drafting(**settings, draft_tensor_parallel=1)


def test_a_port_in_use_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = build({"model": "m", "router": {"grpc_port": port, "http_port": 0}})
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use. Choose another with --grpc-port"):
            check_ports(config)
    check_ports(config)


def test_an_address_of_another_machine() -> None:
    config = build({"model": "m", "router": {"host": "192.0.2.1", "api_key": "long enough"}})
    with pytest.raises(ConfigError, match=r"cannot listen on 192.0.2.1: .* Is it an address of this machine\?"):
        check_ports(config)


def test_a_dashboard_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ray\[default\]'"):
        checks.check_dashboard(build({"model": "m", "dashboard": True}))
    checks.check_dashboard(build({"model": "m"}))


def test_a_missing_key_file_is_named() -> None:
    config = build({"model": "m", "router": {"grpc_tls": {"cert": __file__, "key": "/absent.pem"}}})
    with pytest.raises(ConfigError, match=r"router.grpc_tls.key: cannot read /absent.pem: No such file"):
        check_tls(config)


@pytest.mark.parametrize(
    ("settings", "num_cores", "expected"),
    [
        ({"pools": {"mixed": {"replicas": 2}}}, 2, None),
        ({"pools": {"mixed": {"replicas": 3}}}, 2, "warning: 3 workers will share 2 cores"),
        (
            {"pools": {"mixed": {"replicas": 1, "tensor_parallel": 2}}},
            1,
            "2 workers, ranks counted, will share 1 core",
        ),
        ({"device": "cuda", "pools": {"mixed": {"replicas": 3}}}, 2, None),
    ],
)
def test_more_workers_than_cores_is_said_before_it_is_tried(
    settings: dict[str, object], num_cores: int, expected: str | None
) -> None:
    said = crowding(build({"model": "m", **settings}), num_cores)
    assert said is None if expected is None else expected in (said or "")


def test_traces_that_cannot_be_sent_are_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = build({"model": "m", "otlp_endpoint": "http://collector:4318"})
    checks.check_traces(asked)
    monkeypatch.setattr(otlp, "find_spec", lambda _: None)
    checks.check_traces(build({"model": "m"}))
    with pytest.raises(ConfigError, match=r"run `pip install 'diptych\[otel\]'`, or leave them out"):
        checks.check_traces(asked)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    checks.check_traces(asked)


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://", "file:///x"])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        build({"model": "m", "otlp_endpoint": endpoint})
