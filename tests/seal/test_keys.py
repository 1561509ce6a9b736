# SPDX-License-Identifier: Apache-2.0
"""The file of keys, and the seal in a header."""

from __future__ import annotations

import builtins
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.frame import HEADER_BYTES, SEAL_AT, ChunkFrame, describe_header
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.errors import ConfigError
from lmcache_redis.seal import Opened, SealKeys, read_seal_keys

ONE, TWO, THREE = (bytes([n]) * 32 for n in (1, 2, 3))
KEY = b"lmcr2: of this stripe"
PAYLOAD = b"what a prompt became" * 20


def key_file(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


# ------------------------------------------------------------------- the file


def test_no_file_is_no_keys() -> None:
    assert read_seal_keys(None) is None
    assert read_seal_keys("") is None


def test_the_keys_of_a_file_in_their_order(tmp_path: Path) -> None:
    lines = ["# the first seals", ONE.hex(), "", f"  {TWO.hex().upper()} ", THREE.hex()]
    keys = read_seal_keys(key_file(tmp_path / "keys", "\n".join(lines)))
    assert keys is not None
    assert keys.ids == SealKeys([ONE, TWO, THREE]).ids
    assert len({*keys.ids}) == 3


def test_a_key_id_is_stable() -> None:
    """It is in values: another id would make all of them misses."""
    assert SealKeys([ONE]).ids[0].hex() == "5ab93b3224f549a7"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "contains no key"),
        ("# nothing\n\n", "contains no key"),
        (ONE.hex()[:-1], "line 1 .* is no key"),
        (ONE.hex() + "00", "line 1 .* is no key"),
        (f"{ONE.hex()}\n{'zz' * 32}", "line 2 .* is no key"),
        (f"{ONE.hex()}\n{TWO.hex()} {THREE.hex()}", "line 2 .* is no key"),
        (f"{ONE.hex()}\n{ONE.hex().upper()}", "line 2 .* repeats a key"),
    ],
)
def test_a_wrong_file_is_refused_and_not_quoted(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read_seal_keys(key_file(tmp_path / "keys", text))
    for word in text.replace("#", " ").split():
        assert word == "nothing" or word not in str(refused.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        read_seal_keys(str(tmp_path / "missing"))
    path = tmp_path / "binary"
    path.write_bytes(os.urandom(31) + b"\xff")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="contains no keys"):
        read_seal_keys(str(path))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o601])
def test_a_file_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=r"open to others: run `chmod g-w,o-rwx .*keys`"):
        read_seal_keys(key_file(tmp_path / "keys", ONE.hex(), mode))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_its_group_may_read_it(tmp_path: Path, mode: int) -> None:
    assert read_seal_keys(key_file(tmp_path / "keys", ONE.hex(), mode)) is not None


def test_without_cryptography_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_cryptography(name: str, *arguments: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError("No module named 'cryptography'")
        return real_import(name, *arguments)

    monkeypatch.delitem(sys.modules, "lmcache_redis.seal.xaes", raising=False)
    monkeypatch.setattr(builtins, "__import__", no_cryptography)
    with pytest.raises(ConfigError, match="pip install 'cryptography>=50,<51'"):
        SealKeys([ONE])


@pytest.mark.parametrize("keys", [[], [b""], [ONE[:-1]], [ONE, TWO + b"x"]])
def test_keys_have_32_bytes(keys: list[bytes]) -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        SealKeys(keys)


def test_no_repr_shows_a_key() -> None:
    shown = repr(SealKeys([ONE, TWO]))
    assert shown == f"SealKeys({', '.join(each.hex() for each in SealKeys([ONE, TWO]).ids)})"
    assert ONE.hex()[:8] not in shown


# ------------------------------------------------------------------- the seal


def frame_of(nbytes: int = len(PAYLOAD)) -> ChunkFrame:
    metadata = RemoteMetadata(nbytes, [(nbytes,)], ["uint8"], MemoryFormat.PAGES)
    return ChunkFrame(bytes(range(32)), b"a chunk's hash", nbytes, nbytes, metadata.serialize())


def sealed(keys: SealKeys, key: bytes = KEY) -> tuple[bytearray, bytearray]:
    """Header, without checksums, and ciphertext."""
    header = bytearray(frame_of().bare_header(0, b"s" * 16, 1234, is_sealed=True))
    room = memoryview(bytearray(1000))
    payload = keys.seal(key, header, memoryview(PAYLOAD), room)
    return header, bytearray(payload)


def opened(keys: SealKeys, header: bytes, payload: bytes, key: bytes = KEY) -> Opened:
    slot = bytearray(payload)
    result = keys.open(key, bytes(header), memoryview(slot))
    assert slot == PAYLOAD or result is not Opened.OK
    return result


def test_sealed_and_opened() -> None:
    keys = SealKeys([ONE])
    header, payload = sealed(keys)
    assert payload != PAYLOAD
    assert opened(keys, header, payload) is Opened.OK


def test_the_first_key_seals_and_every_key_opens() -> None:
    old = sealed(SealKeys([ONE]))
    rotating = SealKeys([TWO, ONE])
    assert opened(rotating, *old) is Opened.OK
    new = sealed(rotating)
    assert new[0][SEAL_AT : SEAL_AT + 8] == SealKeys([TWO]).ids[0]
    assert opened(SealKeys([TWO]), *new) is Opened.OK
    assert opened(SealKeys([ONE]), *new) is Opened.UNKNOWN_KEY


def test_every_encryption_has_a_nonce_of_its_own() -> None:
    """Also of the same bytes for the same place: a stripe may be sent again."""
    keys = SealKeys([ONE])
    made = [sealed(keys) for _ in range(100)]
    assert len({bytes(header[600:624]) for header, _ in made}) == 100
    assert len({bytes(payload) for _, payload in made}) == 100


def test_the_checksums_are_those_of_the_ciphertext() -> None:
    """They are filled in afterwards, and do not count for the tag."""
    keys = SealKeys([ONE])
    header, payload = sealed(keys)
    header[56:64] = xxh3_64_intdigest(payload).to_bytes(8, "little")
    header[168:176] = xxh3_64_intdigest(header).to_bytes(8, "little")
    assert opened(keys, header, payload) is Opened.OK
    said = describe_header(header)
    assert said.sealed_with == keys.ids[0]
    assert said.checksum == xxh3_64_intdigest(payload)


UNAUTHENTICATED = {*range(56, 64), *range(168, 176)}


def test_every_other_byte_of_the_header_is_authenticated() -> None:
    keys = SealKeys([ONE])
    header, payload = sealed(keys)
    for at in range(HEADER_BYTES):
        changed = bytearray(header)
        changed[at] ^= 1 << at % 8
        expected = Opened.OK if at in UNAUTHENTICATED else Opened.FORGED
        if SEAL_AT <= at < SEAL_AT + 8:
            expected = Opened.UNKNOWN_KEY
        assert opened(keys, changed, payload) is expected, at


def test_another_payload_is_none() -> None:
    keys = SealKeys([ONE])
    header, payload = sealed(keys)
    for at in (0, 100, len(PAYLOAD) - 1):
        changed = bytearray(payload)
        changed[at] ^= 1
        assert opened(keys, header, changed) is Opened.FORGED
    assert opened(keys, header, payload[:-1]) is Opened.FORGED
    assert opened(keys, header, payload + b"x") is Opened.FORGED


@pytest.mark.parametrize("other", [KEY[:-1], KEY + b"x", b"", b"x" + KEY])
def test_a_value_under_another_key_is_none(other: bytes) -> None:
    keys = SealKeys([ONE])
    assert opened(keys, *sealed(keys), key=other) is Opened.FORGED


def test_parts_of_two_seals_do_not_go_together() -> None:
    keys = SealKeys([ONE])
    one, two = sealed(keys), sealed(keys)
    for cut in itertools.pairwise((SEAL_AT, SEAL_AT + 8, SEAL_AT + 32, HEADER_BYTES)):
        mixed = bytearray(one[0])
        mixed[slice(*cut)] = two[0][slice(*cut)]
        same = cut[0] == SEAL_AT  # the key's id
        assert opened(keys, mixed, one[1]) is (Opened.OK if same else Opened.FORGED)
    assert opened(keys, one[0], two[1]) is Opened.FORGED
