# SPDX-License-Identifier: Apache-2.0
"""How the disk tier handles files that are not what it wrote."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import struct
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from lmcache_redis.cache.disk.files import LOCK_NAME, ChunkFiles, Scan, read_chunk
from lmcache_redis.cache.disk.format import PAGE_BYTES, check_page, file_path, pack_page
from lmcache_redis.chunks.frame import (
    HEADER_BYTES,
    ChunkFrame,
    add_checksums,
    describe_header,
    mark_packed,
)
from lmcache_redis.chunks.keys import ObjectKey, hash_tag
from lmcache_redis.chunks.names import TENSORS, key_stem
from lmcache_redis.errors import FormatError
from tests.cache.disk.directory import (
    NAMES,
    Disk,
    disk_use,
    files_in,
    fill,
    held,
    key_of,
    metadata_of,
    payload_of,
)

KEY = ObjectKey(bytes(range(32)), "org/model", 0x0201_0201)
CHUNK_KEY = NAMES.chunk_key(KEY)
PAYLOAD = bytes(range(1, 200))
METADATA = metadata_of(len(PAYLOAD))
FRAME = NAMES.frame(KEY, METADATA, 64)
FILE_BYTES = PAGE_BYTES + len(PAYLOAD)
# The header and the key are whole before that. Behind it the page is empty, then comes the payload.
ENDS = PAGE_BYTES - 1, PAGE_BYTES, FILE_BYTES - 1
PLACES = [*range(900), *range(900, FILE_BYTES, 13), *ENDS]


def file_of(key: ObjectKey, sequence: int) -> str:
    return file_path(NAMES.chunk_key(key), sequence)


@pytest.fixture
def path(directory: Path) -> Path:
    """A file of KEY, with no tier open."""
    directory.mkdir()
    ChunkFiles(directory).write(CHUNK_KEY, 5, FRAME, memoryview(PAYLOAD))
    (path,) = files_in(directory)
    return path


def is_served(path: Path) -> bool:
    """Whether a get finds the file valid."""
    target = bytearray(len(PAYLOAD))
    fd = os.open(path, os.O_RDONLY)
    try:
        read_chunk(fd, CHUNK_KEY, FRAME, memoryview(target))
    except FormatError:
        return False
    finally:
        os.close(fd)
    assert target == PAYLOAD
    return True


def test_a_file_byte_by_byte(path: Path, directory: Path) -> None:
    raw = path.read_bytes()
    header = describe_header(raw)
    assert header.fingerprint == TENSORS == blake2b(b"lmcr2.tensors", digest_size=32).digest()
    assert (header.stripe_index, header.stripe_count, header.payload_bytes) == (0, 4, 64)
    assert header.chunk_bytes == len(PAYLOAD)
    assert header.checksum == xxh3_64_intdigest(PAYLOAD)
    assert header.chunk_hash == KEY.chunk_hash
    assert header.metadata == METADATA
    page = bytearray(raw[640:4096])
    magic, version, length, own = struct.unpack_from("<4sHHQ", page)
    assert (magic, version, length) == (b"LMCK", 3, len(CHUNK_KEY))
    assert page[16 : 16 + length] == CHUNK_KEY
    stem = key_stem(TENSORS[:16], "org/model", 0x0201_0201, 32)
    assert stem + hash_tag(KEY.chunk_hash) == CHUNK_KEY
    assert not any(page[16 + length :])
    page[8:16] = bytes(8)
    assert own == xxh3_64_intdigest(page)
    assert raw[4096:] == PAYLOAD
    digest = blake2b(CHUNK_KEY, digest_size=20, person=b"lmcr2.disk").hexdigest()
    assert path == directory / digest[:2] / f"{digest}-0000000000000005.lmcr"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("writes", "said"),
    [
        # Files of version 1 had another key, and so other names.
        ([(644, struct.pack("<HHQ", 1, len(KEY.to_bytes()), 0))], "of version 1"),
        # The key was elsewhere: its place says nothing.
        ([(4, struct.pack("<H", 1)), (640, bytes(60))], "of an unknown version"),
    ],
)
def test_a_file_of_another_version_is_removed(
    path: Path,
    directory: Path,
    caplog: pytest.LogCaptureFixture,
    writes: list[tuple[int, bytes]],
    said: str,
) -> None:
    raw = bytearray(path.read_bytes())
    for at, written in writes:
        raw[at : at + len(written)] = written
    path.write_bytes(raw)
    assert not is_served(path)
    assert Scan(directory).found == []
    assert not path.exists()
    assert said in caplog.text


def test_files_of_an_earlier_version_are_removed_with_one_line(
    path: Path, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The key was elsewhere then, behind a shorter header of version 1."""
    raw = bytearray(path.read_bytes())
    struct.pack_into("<HH", raw, 4, 1, 512)
    struct.pack_into("<4sHHQ", raw, 512, b"LMCK", 2, len(CHUNK_KEY), 0)
    for sequence in range(5, 8):
        path.with_name(f"{path.name[:41]}{sequence:016x}.lmcr").write_bytes(raw)
    assert len(files_in(directory)) == 3
    assert Scan(directory).found == []
    assert files_in(directory) == []
    (record,) = caplog.records
    assert "3 files" in record.message
    assert "it is of version 2, not 3" in record.message


def test_a_packed_payload_is_none_of_a_file(
    path: Path, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its payload is as long as it says, and has the checksum."""
    payload = bytes(1000)
    frame = NAMES.frame(KEY, metadata_of(len(payload)), 1000)
    page = pack_page(CHUNK_KEY, frame, xxh3_64_intdigest(payload))
    assert check_page(page, CHUNK_KEY, frame) == xxh3_64_intdigest(payload)
    header = page[:HEADER_BYTES]
    mark_packed(header, 2, 999)
    add_checksums(header, xxh3_64_intdigest(payload))
    page[:HEADER_BYTES] = header
    with pytest.raises(FormatError, match="packed"):
        check_page(page, CHUNK_KEY, frame)
    path.write_bytes(page + payload)
    assert Scan(directory).found == []
    assert "packed" in caplog.text


@pytest.mark.parametrize("nbytes", [3440, 3441])
def test_a_key_fits_or_is_refused(directory: Path, nbytes: int) -> None:
    frame = ChunkFrame(TENSORS, b"h" * 32, 8, 8, metadata_of(8).serialize())
    files = ChunkFiles(directory)
    directory.mkdir()
    key = b"k" * (nbytes - 66) + hash_tag(b"h" * 32)
    if nbytes == 3441:
        with pytest.raises(OSError, match="at most 3440 bytes"):
            files.write(key, 0, frame, memoryview(bytes(8)))
        assert files_in(directory) == []
        return
    files.write(key, 0, frame, memoryview(bytes(8)))
    assert [found.key for found in Scan(directory).found] == [key]


def test_a_file_that_ends_too_early_or_too_late(path: Path, directory: Path) -> None:
    raw = path.read_bytes()
    for end in PLACES:
        path.write_bytes(raw[:end])
        assert not is_served(path)
        assert Scan(directory).found == []
        assert not path.exists()
    for longer in (raw + b"\0", raw + raw):
        path.write_bytes(longer)
        assert not is_served(path)
        assert Scan(directory).found == []
    path.write_bytes(raw)
    assert is_served(path)
    assert [found.key for found in Scan(directory).found] == [CHUNK_KEY]


def test_a_bit_that_flips(path: Path, directory: Path) -> None:
    """A scan detects damage to a first page, a get also damage to a payload."""
    raw = path.read_bytes()
    for at in PLACES:
        flipped = bytearray(raw)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        assert not is_served(path)
        assert len(Scan(directory).found) == (at >= PAGE_BYTES)
        assert path.exists() == (at >= PAGE_BYTES)


@pytest.mark.parametrize("at", [0, 60, 640, 2000, PAGE_BYTES, -1])
def test_a_damaged_chunk_is_a_miss_and_goes(
    open_tier: Callable[..., Disk], directory: Path, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    tier = open_tier()
    fill(tier, [1, 2])
    path = directory / file_of(key_of(1), 0)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)
    caplog.clear()
    assert tier.contains(key_of(1))
    assert tier.get(key_of(1)) is None
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    assert tier.get(key_of(1)) is None
    assert len(caplog.records) == 1
    assert not tier.contains(key_of(1))
    assert not path.exists()
    assert held(tier) == [2]
    assert tier.used_bytes == 8192
    fill(tier, [1])
    assert tier.get(key_of(1)) == payload_of(1, 100)


def test_the_file_of_another_chunk_is_not_served(
    open_tier: Callable[..., Disk], directory: Path
) -> None:
    tier = open_tier()
    for rank in (0, 1):
        # The same hash, the same payload: only the key differs.
        key = ObjectKey(b"same", "org/model", rank)
        assert tier.put(key, PAYLOAD)
    first, second = (
        directory / file_of(ObjectKey(b"same", "org/model", rank), rank) for rank in (0, 1)
    )
    shutil.copyfile(first, second)
    assert tier.get(ObjectKey(b"same", "org/model", 1)) is None
    assert not second.exists()
    shutil.copyfile(first, second)
    tier.close()
    tier = open_tier()
    assert tier.list() == [ObjectKey(b"same", "org/model", 0)]
    assert not second.exists()


def test_a_header_and_a_key_of_two_chunks_are_no_chunk(path: Path, directory: Path) -> None:
    """Each is valid by itself."""
    raw = bytearray(path.read_bytes())
    other = NAMES.frame(key_of(1), METADATA, 64)
    raw[:640] = pack_page(CHUNK_KEY, other, xxh3_64_intdigest(PAYLOAD))[:640]
    path.write_bytes(raw)
    assert not is_served(path)
    assert Scan(directory).found == []
    assert not path.exists()


def test_of_two_files_of_a_chunk_the_later_counts(
    open_tier: Callable[..., Disk], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.mkdir()
    files = ChunkFiles(directory)
    for sequence in (7, 300, 12):
        payload = memoryview(struct.pack("<Q", sequence))
        files.write(CHUNK_KEY, sequence, NAMES.frame(KEY, metadata_of(8), 8), payload)
    tier = open_tier()
    assert tier.get(KEY) == struct.pack("<Q", 300)
    assert files_in(directory) == [directory / file_of(KEY, 300)]
    assert caplog.text.count("stored again") == 2
    assert tier.put(KEY, PAYLOAD)
    assert files_in(directory) == [directory / file_of(KEY, 301)]


def test_files_of_others_are_left_alone(
    open_tier: Callable[..., Disk], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digest = file_of(KEY, 0)[3:43]
    aa = digest[:2]
    fanout = directory / aa
    fanout.mkdir(parents=True)
    theirs = [
        directory / "README",
        directory / f"{digest}-{0:016x}.lmcr",
        directory / "not" / f"{digest}-{0:016x}.lmcr",
        fanout / "notes.txt",
        fanout / f"{digest}.lmcr",
        fanout / f"{digest}-{0:016x}.lmcr.old",
        fanout / f"{digest.upper()}-{0:016x}.lmcr",
        fanout / f"{'0' if aa[0] != '0' else '1'}{digest[1:]}-{0:016x}.lmcr",
    ]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("theirs")
    link = fanout / f"{digest}-{1:016x}.lmcr"
    link.symlink_to(directory / "README")
    (fanout / f"{digest}-{2:016x}.lmcr").mkdir()
    (directory / LOCK_NAME).touch()
    tier = open_tier(4 * 8192)
    assert "left alone" in caplog.text
    assert len(caplog.records) == 1
    fill(tier, range(10))
    tier.close()
    assert len(open_tier(4 * 8192).list()) == 4
    assert all(path.read_text() == "theirs" for path in theirs)
    assert link.is_symlink()


def test_what_was_never_finished_is_removed(
    open_tier: Callable[..., Disk], directory: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    temporary = path.with_name(f"{path.name[:40]}-{9:016x}.lmcr.tmp")
    temporary.write_bytes(path.read_bytes())
    tier = open_tier()
    assert not temporary.exists()
    assert "never finished" in caplog.text
    assert tier.get(KEY) == PAYLOAD


# ------------------------------------------------------------------ while the tier is open


def test_a_directory_that_somebody_removed(
    open_tier: Callable[..., Disk], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()
    fill(tier, range(3))
    shutil.rmtree(directory)
    caplog.clear()
    for number in range(3):
        assert not tier.put(key_of(number), payload_of(1, 5))
        assert tier.get(key_of(number)) is None
    assert tier.list() == []
    assert tier.used_bytes == 0
    assert len(caplog.records) == 2, "one of each kind"


@pytest.mark.parametrize(("code", "kept"), [(errno.EIO, False), (errno.ENOMEM, True)])
def test_a_read_that_fails_is_a_miss(
    open_tier: Callable[..., Disk],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
    kept: bool,
) -> None:
    tier = open_tier()
    fill(tier, [1])
    with monkeypatch.context() as patch:

        def fail(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        patch.setattr(os, "fstat", fail)
        assert tier.get(key_of(1)) is None
    assert os.strerror(code) in caplog.text
    assert tier.contains(key_of(1)) == kept
    assert len(files_in(directory)) == kept
    assert (tier.get(key_of(1)) is not None) == kept


def test_a_file_that_may_not_be_opened_now_is_kept(
    open_tier: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, too many open files: at a get and at a start."""
    tier = open_tier()
    fill(tier, [1])
    really_open = os.open

    def fail(path: str, *more: int, **where: int) -> int:
        if str(path).endswith(".lmcr"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really_open(path, *more, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert tier.get(key_of(1)) is None
    assert tier.get(key_of(1)) == payload_of(1, 100)
    tier.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        tier = open_tier()
    assert tier.list() == []
    tier.close()
    assert open_tier().get(key_of(1)) == payload_of(1, 100)


@pytest.mark.parametrize("call", ["mkdir", "rename", "utime"])
def test_a_write_that_fails_stores_nothing(
    open_tier: Callable[..., Disk],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    tier = open_tier()
    fill(tier, [1])
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, call, fail)
        caplog.set_level(logging.WARNING)
        for number in (1, 2, 3):
            assert not tier.put(key_of(number), payload_of(9, 50))
    assert len(caplog.records) == 1
    assert held(tier) == [1]
    assert tier.get(key_of(1)) == payload_of(1, 100), "what was there stays"
    assert tier.used_bytes == disk_use(directory) == 8192
    fill(tier, [1])
