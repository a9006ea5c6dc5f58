"""The kind of memory file of a pool, depending on the machine."""

import fcntl
import mmap
import os
from pathlib import Path

import pytest

from diptych.workers.kv import pool_file
from diptych.workers.kv.pool_file import PoolFile, anonymous_has_huge_pages, is_fixed

NUM_BYTES = 5 << 20
SIZED = "hugepages-2048kB"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that offers nothing."""

    def refuse() -> tuple[int, int]:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(pool_file, "open_huge_file", refuse)
    monkeypatch.setattr(pool_file, "TRANSPARENT", tmp_path)
    monkeypatch.setattr(pool_file, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\n")
    (tmp_path / SIZED).mkdir()
    return tmp_path


def offer(machine: Path, file: str, mode: str, sized: str | None = None) -> None:
    (machine / file).write_text(f"always inherit [{mode}] other")
    if sized is not None:
        (machine / SIZED / file).write_text(f"always [{sized}]")


@pytest.mark.parametrize("small_pages", [False, True])
def test_without_huge_pages_there_is_a_file_only_where_small_ones_will_do(small_pages: bool) -> None:
    file = PoolFile.make(NUM_BYTES, small_pages=small_pages)
    assert (file.pages if file else None) == ("small" if small_pages else None)


@pytest.mark.parametrize(
    ("mode", "sized", "expected"),
    [
        ("advise", None, True),
        ("never", None, False),
        ("deny", "always", True),
        ("never", "advise", True),
        ("advise", "never", False),
        ("advise", "inherit", True),
        ("never", "inherit", False),
    ],
)
def test_what_the_system_says_of_one_size_goes_before_what_it_says_of_all(
    mode: str, sized: str | None, expected: bool, machine: Path
) -> None:
    offer(machine, "shmem_enabled", mode, sized)
    offer(machine, "enabled", mode, sized)
    file = PoolFile.make(NUM_BYTES, small_pages=False)
    assert (file.pages if file else None) == ("transparent" if expected else None)
    assert anonymous_has_huge_pages() == expected


def test_pages_that_are_set_aside_but_refused_are_done_without(machine: Path) -> None:
    (machine / "meminfo").write_text("HugePages_Free: 9999999\nHugePages_Rsvd: 0\nHugepagesize: 2048 kB\n")
    file = PoolFile.make(64 << 40, small_pages=True)
    assert file is not None and file.pages == "small"


def test_pages_that_others_have_reserved_are_not_counted_on(machine: Path) -> None:
    (machine / "meminfo").write_text("HugePages_Free: 4\nHugePages_Rsvd: 2\nHugepagesize: 2048 kB\n")
    assert PoolFile.make(NUM_BYTES, small_pages=False) is None


def test_a_mounted_file_is_in_huge_pages_and_its_reader_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    try:
        writable, readable = pool_file.open_huge_file()
    except PermissionError:
        pytest.skip("mounting asks for CAP_SYS_ADMIN")
    file = PoolFile(writable, readable, "mounted")
    mapping = file.map(4 << 20)
    mapping[0] = 7
    assert os.fstat(readable).st_blocks * 512 == 2 << 20, "one page"
    file.seal()
    assert is_fixed(readable) and os.pread(readable, 1, 0) == b"\7"
    with pytest.raises(OSError, match="Read-only"):
        os.open(f"/proc/self/fd/{readable}", os.O_RDWR)
    mapping[1] = 8


def test_a_file_is_sealed_when_all_have_mapped_it_and_they_write_on() -> None:
    file = PoolFile.make(None, small_pages=True)
    assert file is not None
    ranks = [file.map(NUM_BYTES) for _ in range(2)]
    assert not is_fixed(file.reader_fd)
    file.seal()
    file.seal()
    assert is_fixed(file.reader_fd)
    seals = fcntl.fcntl(file.reader_fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | pool_file.F_SEAL_FUTURE_WRITE
    for number, mapping in enumerate(ranks):
        mapping[number] = number + 1
    assert os.pread(file.reader_fd, 2, 0) == b"\1\2"
    assert mmap.mmap(file.reader_fd, NUM_BYTES, prot=mmap.PROT_READ)[:2] == b"\1\2"


def test_its_descriptors_end_with_it() -> None:
    file = PoolFile.make(NUM_BYTES, small_pages=True)
    assert file is not None
    descriptors = file.fd, file.reader_fd
    del file
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)
