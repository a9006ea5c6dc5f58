"""Files of API keys: what is read, and what is refused without showing a key."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from diptych.cluster.front.access.key_file import MAX_FILE_BYTES, MAX_KEYS, KeyFile, NamedKey, parse
from diptych.workers.common.errors import ConfigError

STRANGER = 54321  # id of a user, and of a group, that this process is not in
SECRET = "sk-alice-0123456789"
HEX = hashlib.sha256(b"sk-bob-0123456789").hexdigest()


def write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("as_json", [False, True])
def test_a_name_has_a_key_or_its_sha256(tmp_path: Path, as_json: bool) -> None:
    entries = {"alice": SECRET, "bob": {"sha256": HEX.upper(), "service_tier": "flex"}}
    yaml = f"alice: {SECRET}\nbob:\n  sha256: {HEX.upper()}\n  service_tier: flex\n"
    file = KeyFile(write(tmp_path / "keys", json.dumps(entries) if as_json else yaml))
    assert file.load() == (
        NamedKey("alice", hashlib.sha256(SECRET.encode()).digest()),
        NamedKey("bob", bytes.fromhex(HEX), "flex"),
    )


def test_a_file_that_has_the_same_content_is_not_read_again(tmp_path: Path) -> None:
    file = KeyFile(write(tmp_path / "keys", f"alice: {SECRET}"))
    assert file.load()
    write(tmp_path / "keys", f"alice: {SECRET}")
    assert file.load() is None
    write(tmp_path / "keys", f"carol: {SECRET}")
    assert [key.name for key in file.load() or ()] == ["carol"]


@pytest.mark.parametrize("mode", [0o440, 0o640])
def test_a_group_of_this_process_may_read_it(tmp_path: Path, mode: int) -> None:
    """As a secret that Kubernetes mounts with an fsGroup."""
    assert KeyFile(write(tmp_path / "keys", f"alice: {SECRET}", mode)).load()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(("user", "group"), [(-1, STRANGER), (STRANGER, -1)])
def test_a_group_of_others_may_not_read_it(tmp_path: Path, user: int, group: int) -> None:
    path = write(tmp_path / "keys", f"alice: {SECRET}", 0o440)
    os.chown(path, user, group)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyFile(path).load()


@pytest.mark.parametrize("mode", [0o660, 0o604, 0o602, 0o644])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyFile(write(tmp_path / "keys", f"alice: {SECRET}", mode)).load()


def test_what_is_no_small_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Check router"):
        KeyFile(tmp_path / "absent").load()
    with pytest.raises(ConfigError, match="not a regular file"):
        KeyFile(Path("/dev/null")).load()
    with pytest.raises(ConfigError, match="is it the file of keys"):
        KeyFile(write(tmp_path / "large", b"#" * (MAX_FILE_BYTES + 1))).load()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "has 0 keys"),
        ("\n".join(f"k{i}: {SECRET}{i}" for i in range(MAX_KEYS + 1)), f"has {MAX_KEYS + 1} keys"),
        (f"- {SECRET}", "must hold a mapping"),
        (f"alice: [{SECRET}", "not valid YAML: see line 1"),
        (f"alice: {SECRET}\nalice: {SECRET}x", "line 2: alice is given twice"),
        (f"alice: {SECRET}\nbob: {SECRET}", "line 2: bob has the same key as alice"),
        ("alice: short12", "line 1, alice: key: "),
        ("alice: 1234567890", "line 1, alice: key: "),
        (f"alice: {{sha256: {HEX[:-1]}}}", "line 1, alice: sha256: "),
        (f"alice: {{key: {SECRET}, sha256: {HEX}}}", "line 1, alice: give either key or sha256"),
        ("alice: {service_tier: flex}", "line 1, alice: give either key or sha256"),
        (f"alice: {{key: {SECRET}, rate: 3}}", "line 1, alice: rate: "),
        (f"default: {SECRET}", "which is router.api_key"),
        (f"'a b': {SECRET}", "line 1: a name has"),
        (f"'{'a' * 65}': {SECRET}", "line 1: a name has"),
        ("alice: 2001-99-99", "a date or a number in it is impossible"),
        (b"alice: \xff\xff", "write names and keys as text"),
        ("[" * 100_000, "it is nested too deep"),
    ],
)
def test_what_is_wrong_is_named_and_no_key_is_shown(text: str | bytes, what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text.encode() if isinstance(text, str) else text, Path("keys.yaml"))
    assert what in refused.value.message
    chained = "".join(map(str, (refused.value, refused.value.__cause__)))
    assert SECRET not in chained and HEX[:-1] not in chained and "short12" not in chained
