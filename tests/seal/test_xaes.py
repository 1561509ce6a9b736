# SPDX-License-Identifier: Apache-2.0
"""The cipher, against the vectors of its specification and against AES-GCM itself."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.seal.xaes import Xaes256Gcm

# https://c2sp.org/XAES-256-GCM: the two subkeys of CMAC, with and without the carry.
NONCE = b"ABCDEFGHIJKLMNOPQRSTUVWX"
PLAINTEXT = b"XAES-256-GCM"
VECTORS = [
    (b"\x01" * 32, b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
    (
        b"\x03" * 32,
        b"c2sp.org/XAES-256-GCM",
        "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d",
    ),
]


@pytest.mark.parametrize(("key", "associated", "sealed"), VECTORS)
def test_the_vectors_of_the_specification(key: bytes, associated: bytes, sealed: str) -> None:
    cipher, room = Xaes256Gcm(key), bytearray(len(PLAINTEXT))
    tag = cipher.encrypt(NONCE, memoryview(PLAINTEXT), associated, memoryview(room))
    assert (bytes(room) + tag).hex() == sealed
    assert cipher.decrypt(NONCE, memoryview(room), associated, tag)
    assert room == PLAINTEXT


@given(
    key=st.binary(min_size=32, max_size=32),
    nonce=st.binary(min_size=24, max_size=24),
    data=st.binary(min_size=1, max_size=300),
    associated=st.binary(max_size=50),
)
def test_one_message_is_aes_gcm_with_a_key_of_its_own(
    key: bytes, nonce: bytes, data: bytes, associated: bytes
) -> None:
    cipher, room = Xaes256Gcm(key), bytearray(len(data))
    tag = cipher.encrypt(nonce, memoryview(data), associated, memoryview(room))
    derived = _derived(key, nonce[:12])
    assert AESGCM(derived).encrypt(nonce[12:], data, associated) == bytes(room) + tag
    assert cipher.decrypt(nonce, memoryview(room), associated, tag)
    assert room == data


def _derived(key: bytes, salt: bytes) -> bytes:
    """The key of a message, as SP 800-108 has it, by the library's own CMAC."""
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.cmac import CMAC

    blocks = []
    for counter in (1, 2):
        mac = CMAC(AES(key))
        mac.update(counter.to_bytes(2, "big") + b"X\0" + salt)
        blocks.append(mac.finalize())
    return b"".join(blocks)
