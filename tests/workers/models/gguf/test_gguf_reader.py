"""A GGUF file that is damaged, half there or not known is named, with the key or tensor that is wrong, before anything
is served."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.cluster.preflight.checks import check_checkpoint, check_draft
from diptych.workers.common.errors import CheckpointError, ConfigError, UnsupportedArchitecture
from diptych.workers.models.checkpoint.weights import Checkpoint
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.gguf import gguf_reader
from diptych.workers.models.gguf.gguf_files import gguf_paths, read_gguf
from diptych.workers.models.gguf.gguf_reader import read_header
from diptych.workers.models.gguf.gguf_types import GgmlType

from ....support.checkpoints import make_checkpoint
from .gguf_writer import write_gguf

Q = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama", 1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def sound(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(source, tmp_path_factory.mktemp("sound"), lambda _: Type.Q4_0)[0]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(key: str, kind: int, packed: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + packed


def tensor(name: str, sizes: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def file_of(values: list[bytes], tensors: list[bytes], *, version: int = 3, data: int = 64) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values)) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


A = value("a", 4, struct.pack("<I", 1))
BROKEN: dict[str, tuple[bytes, str]] = {
    "another file": (b"PK\x03\x04" + bytes(60), "is no GGUF file"),
    "empty": (b"", "is no GGUF file"),
    "version 1": (file_of([], [], version=1), "has version 1 of GGUF"),
    "big-endian": (file_of([], [], version=3 << 24), r"it is big-endian"),
    "too many values": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + A, "the key of a metadata value does not end"),
    "too many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(8), "tensor  does not end within"),
    "long text": (file_of([text("a") + struct.pack("<IQ", 8, 1 << 40)], []), "metadata a has 1099511627776 bytes"),
    "long list": (file_of([text("a") + struct.pack("<IIQ", 9, 4, 1 << 61)], []), "metadata a does not end within"),
    "long list of texts": (file_of([text("a") + struct.pack("<IIQ", 9, 8, 1 << 59)], []), "metadata a does not end"),
    "list of lists": (file_of([text("a") + struct.pack("<IIQ", 9, 9, 1)], []), "metadata a is a list of type 9"),
    "unknown type": (file_of([value("a", 99, b"")], []), "metadata a has type 99, which is not known"),
    "no UTF-8": (file_of([value("a", 8, struct.pack("<Q", 1) + b"\xff")], []), "metadata a is no UTF-8"),
    "no flag": (file_of([value("a", 7, b"\x02")], []), "metadata a must be 0 or 1, found 2"),
    "key twice": (file_of([A, A], []), "metadata a is there twice"),
    "alignment": (
        file_of([value("general.alignment", 4, struct.pack("<I", 24))], []),
        "general.alignment must be a power of two",
    ),
    "little alignment": (
        file_of([value("general.alignment", 4, struct.pack("<I", 1))], [tensor("t", (4,), 0)]),
        "general.alignment must be a power of two from 8",
    ),
    "unread type": (file_of([], [tensor("t", (4,), 28)]), r"tensor t has type 28 \(F64\); F32, F16, Q4_0"),
    "unknown type of a tensor": (file_of([], [tensor("t", (4,), 77)]), "tensor t has type 77"),
    "axes": (file_of([], [tensor("t", (1, 1, 1, 1, 1), 0)]), "tensor t must have 1 to 4 axes, found 5"),
    "sizes": (file_of([], [tensor("t", (1 << 30, 1 << 30), 0)]), "tensor t has impossible sizes"),
    "no numbers": (file_of([], [tensor("t", (4, 0), 0)]), "tensor t has impossible sizes"),
    "blocks": (file_of([], [tensor("t", (48,), 2)]), r"tensor t has rows of 48 numbers, which blocks of 32 \(Q4_0\)"),
    "offset": (file_of([], [tensor("t", (4,), 0, 8)]), "tensor t begins at 8, which is no multiple of the alignment"),
    "beyond the end": (file_of([], [tensor("t", (17,), 0)]), r"tensor t ends at byte \d+, but the file has \d+"),
    "tensor twice": (file_of([], [tensor("t", (4,), 0)] * 2), "tensor t is there twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_header_is_named(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"m\.gguf.*({message})"):
        read_header(tmp_path / "m.gguf")


def test_a_sound_header(tmp_path: Path) -> None:
    """Each type of value, as the gguf package writes them."""
    values: dict[str, Any] = {"b": True, "i": -5, "u": 1 << 63, "f": 0.5, "s": "é", "l": [1, 2], "t": ["x", ""]}
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_bool("b", values["b"])
    writer.add_int64("i", values["i"])
    writer.add_uint64("u", values["u"])
    writer.add_float64("f", values["f"])
    writer.add_string("s", values["s"])
    writer.add_array("l", values["l"])
    writer.add_array("t", values["t"])
    writer.add_tensor("w", np.zeros((3, 2), dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    found = read_header(tmp_path / "m.gguf")
    assert {key: found.metadata[key] for key in values} == values
    assert [(of.shape, of.type) for of in found.tensors.values()] == [((3, 2), GgmlType("F32", 1, 4))]


def test_a_header_has_a_longest(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_reader, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(CheckpointError, match="is beyond the 0 MiB that a header may have"):
        read_header(sound)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 9000), byte=st.integers(0, 255), kept=st.floats(0, 1))
def test_any_damage_is_an_error_or_no_harm(sound: Path, tmp_path: Path, at: int, byte: int, kept: float) -> None:
    content = bytearray(sound.read_bytes())
    content[at % len(content)] = byte
    (tmp_path / "m.gguf").write_bytes(content[: int(kept * len(content))] if kept < 0.5 else content)
    try:
        spec = load_spec(tmp_path / "m.gguf")
        Checkpoint(tmp_path / "m.gguf", spec)
    except CheckpointError as e:
        assert "m.gguf" in e.message


def test_every_cut_of_a_file_is_named(sound: Path, tmp_path: Path) -> None:
    content = sound.read_bytes()
    for length in (10, 100, 3000, len(content) // 2, len(content) - 33):
        (tmp_path / "m.gguf").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"m\.gguf.*(is no GGUF file|it is not complete)"):
            check_checkpoint(tmp_path / "m.gguf")


Change = Callable[[GGUFWriter], object]


def of_key(key: str, put: Callable[[GGUFWriter, str], object]) -> Change:
    """Leave out a key, and put another value there."""

    def change(writer: GGUFWriter) -> None:
        for values in writer.kv_data:
            values.pop(key, None)
        put(writer, key)

    return change


def nothing(_writer: GGUFWriter, _key: str) -> None: ...


@pytest.mark.parametrize(
    ("key", "put", "message"),
    [
        ("llama.block_count", nothing, "llama.block_count is missing"),
        ("llama.block_count", lambda w, k: w.add_uint32(k, 0), r"llama.block_count must be a whole number in \[1"),
        ("llama.block_count", lambda w, k: w.add_string(k, "x"), "llama.block_count must be a whole number"),
        ("llama.attention.head_count", nothing, "llama.attention.head_count is missing"),
        ("llama.attention.head_count_kv", lambda w, k: w.add_array(k, [2, 1]), "must be the same for all layers"),
        ("llama.attention.value_length", lambda w, k: w.add_uint32(k, 8), "must be attention.key_length=16"),
        ("llama.rope.dimension_count", lambda w, k: w.add_uint32(k, 8), "must be 16, a whole head"),
        ("llama.rope.freq_base", lambda w, k: w.add_float32(k, float("nan")), "freq_base must be a finite number"),
        ("llama.rope.scaling.type", lambda w, k: w.add_string(k, "su"), "must be one of none, linear, yarn, longrope"),
        ("llama.rope.scaling.attn_factor", lambda w, k: w.add_float32(k, 0.5), "attn_factor must be 1: other factors"),
        ("llama.rope.scaling.yarn_ext_factor", lambda w, k: w.add_float32(k, 0.0), "yarn_ext_factor must be 1: other"),
        ("llama.attention.causal", lambda w, k: w.add_bool(k, False), "attention.causal must be true"),
        ("tokenizer.ggml.eos_token_id", lambda w, k: w.add_uint32(k, 500), "eos_token_id must be below 500, found 500"),
        ("tokenizer.ggml.tokens", nothing, "tokenizer.ggml.tokens is missing|eos_token_id must be below"),
        ("tokenizer.ggml.token_type", lambda w, k: w.add_array(k, [1]), "token_type must have 500 values"),
        ("tokenizer.ggml.model", lambda w, k: w.add_string(k, "t5"), "model is 't5'; gpt2 and llama are read: put the"),
        ("tokenizer.ggml.add_bos_token", lambda w, k: w.add_uint32(k, 1), "add_bos_token must be of type bool"),
        ("tokenizer.chat_template", lambda w, k: w.add_uint32(k, 1), "chat_template must be a text"),
    ],
)  # fmt: skip
def test_metadata_that_says_nothing_sound_is_named(
    key: str, put: Callable[[GGUFWriter, str], object], message: str, source: Path, tmp_path: Path
) -> None:
    path, _ = write_gguf(source, tmp_path, change=of_key(key, put))
    with pytest.raises(CheckpointError, match=rf"model.gguf: metadata .*({message})"):
        check_checkpoint(path)


@pytest.mark.parametrize(
    ("values", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, 4.0),  # linear, where no type is named
        ({"rope.scale_linear": 2.0}, 2.0),  # as older files have it
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, 4.0),
        ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, None),
    ],
)
def test_a_factor_of_positions(values: dict[str, Any], factor: float | None, source: Path, tmp_path: Path) -> None:
    """What llama.cpp makes of metadata that name no type of scaling, or name it otherwise."""

    def change(writer: GGUFWriter) -> None:
        for key, of in values.items():
            (writer.add_string if isinstance(of, str) else writer.add_float32)(f"llama.{key}", of)

    path, _ = write_gguf(source, tmp_path, change=change)
    attention = load_spec(path).layers[0].attention
    assert (attention.rope.rope_type, attention.rope.factor) == (("linear", factor) if factor else ("default", 1.0))


def test_an_architecture_that_is_not_served_is_named(source: Path, tmp_path: Path) -> None:
    path, _ = write_gguf(source, tmp_path, change=of_key("general.architecture", lambda w, k: w.add_string(k, "rwkv7")))
    with pytest.raises(
        UnsupportedArchitecture, match=r"general.architecture is 'rwkv7'; .* serves llama, qwen2, qwen3"
    ):
        check_checkpoint(path)


def rewrite(path: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write a file anew with other tensors: name -> (bytes or numbers, type)."""
    reader = gguf.GGUFReader(path)
    tensors: dict[str, Any] = {of.name: (np.array(of.data), of.tensor_type) for of in reader.tensors}
    change(tensors)
    writer = GGUFWriter(target, "llama")
    for key, of in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = of.types[0]
            writer.add_key_value(key, of.contents(), kind, of.types[-1] if len(of.types) > 1 else None)
    for name, (numbers, kind) in tensors.items():
        writer.add_tensor(name, numbers, raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return target


def not_finite(tensors: dict[str, Any]) -> None:
    tensors[Q][0].reshape(-1)[:2] = (0, 0x7C)  # the scale of the first block


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), rf"tensor {Q} of shape \[128, 64\] is missing"),
        (lambda t: t.update({Q: (t[Q][0][:64], t[Q][1])}), rf"{Q} must have shape \[128, 64\], .* found \[64, 64\]"),
        (lambda t: t.update(other=t[Q]), "tensor other is unexpected"),
        (not_finite, rf"tensor {Q} has a number that is not finite"),
    ],
)
def test_tensors_that_contradict_the_metadata(
    change: Callable[[dict[str, Any]], object], message: str, sound: Path, tmp_path: Path
) -> None:
    path = rewrite(sound, tmp_path / "m.gguf", change)
    with pytest.raises(CheckpointError, match=rf"m\.gguf: .*{message}"):
        import torch

        Checkpoint(path, load_spec(path)).load(torch.float32, torch.device("cpu"))


def test_which_files_are_a_model(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert gguf_paths(folder) == ()
    one = folder / "one.gguf"
    one.write_bytes(sound.read_bytes())
    (folder / "mmproj-one.gguf").write_bytes(b"")
    assert gguf_paths(folder) == gguf_paths(one) == (one,)
    other = folder / "other.gguf"
    other.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds several models \(one.gguf, other.gguf\): give the path of one"):
        check_checkpoint(folder)
    check_checkpoint(one)
    other.unlink()
    (folder / "config.json").write_text("{}")
    assert gguf_paths(folder) == ()
    with pytest.raises(CheckpointError, match="architectures must be a list"):
        check_checkpoint(folder)
    with pytest.raises(ConfigError, match="is a file, and no GGUF file"):
        check_checkpoint(folder / "config.json")


def test_a_folder_of_both_names_the_file_to_give(source: Path, sound: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "m.gguf").write_bytes(sound.read_bytes())
    with pytest.raises(CheckpointError, match=r"its weights as m.gguf: to serve these, give the path of that file"):
        check_checkpoint(tmp_path)


def test_a_model_in_several_files(source: Path, tmp_path: Path) -> None:
    import torch

    whole, _ = write_gguf(source, tmp_path / "whole")
    (tmp_path / "split").mkdir()
    paths = [tmp_path / "split" / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    names = sorted(of.name for of in gguf.GGUFReader(whole).tensors)
    for number, path in enumerate(paths):
        kept = set(names[number::2])
        parts: dict[str, Any] = {}
        rewrite(whole, path, lambda t, kept=kept, parts=parts: [t.pop(name) for name in list(t) if name not in kept])
        content = path.read_bytes()
        path.write_bytes(with_values(content, {"split.no": number, "split.count": 2}))
    for path in (paths[0], paths[1], tmp_path / "split"):
        assert gguf_paths(path) == tuple(paths)
        found = Checkpoint(path, load_spec(path)).load(torch.float32, torch.device("cpu"))
        expected = Checkpoint(whole, load_spec(whole)).load(torch.float32, torch.device("cpu"))
        assert torch.equal(found.embed, expected.embed)
        assert torch.equal(found.layers[0].qkv, expected.layers[0].qkv)
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"split.no and split.count must be 1 and 2"):
        read_gguf(paths[0])
    paths[1].unlink()
    with pytest.raises(
        CheckpointError, match=r"m-00002-of-00002.gguf does not exist, and m-00001-of-00002.gguf is one"
    ):
        check_checkpoint(paths[0])
    alone = paths[0].rename(tmp_path / "split" / "alone.gguf")
    with pytest.raises(CheckpointError, match=r"is one of 2 files \(split.count\)"):
        check_checkpoint(alone)


def with_values(content: bytes, values: dict[str, int]) -> bytes:
    """Add whole numbers to a file's metadata; its tensors stay aligned."""
    num_tensors, num_values = struct.unpack("<QQ", content[8:24])
    added = b"".join(value(key, 4, struct.pack("<I", of)) for key, of in values.items())
    filler = 32 * 4 - (len(added) + len(text("filler")) + 12) % 32
    added += value("filler", 8, text("x" * (filler % 32)))
    assert len(added) % 32 == 0
    return content[:8] + struct.pack("<QQ", num_tensors, num_values + len(values) + 1) + added + content[24:]


def test_a_gguf_file_may_draft(sound: Path, source: Path) -> None:
    assert check_draft(sound, source, None).vocab_size == 500


@pytest.mark.parametrize("key", ["llama.block_count", "llama.attention.head_count", "llama.feed_forward_length"])
def test_nothing_is_made_of_a_size_before_it_is_checked(key: str, source: Path, tmp_path: Path) -> None:
    """Tensors of the sizes that such metadata name would fill any memory."""
    path, _ = write_gguf(source, tmp_path, change=of_key(key, lambda w, k: w.add_uint32(k, 1 << 24)))
    with pytest.raises(CheckpointError, match=r"must have shape|must be at most the number of tensors"):
        Checkpoint(path, load_spec(path))
