# SPDX-License-Identifier: Apache-2.0
"""Sealed values: XAES-256-GCM over the payload of each stripe (docs/internals/security.md).

The seal is the last 48 bytes of a stripe's header:

    592   8s  key id        600  24s  nonce        624  16s  tag

The nonce is drawn by the operating system for every encryption: also when a stripe is sent again.
Associated data are the header, with both checksums and the tag zero, and the whole Redis key. So a
value is good only where, and as what, it was stored. The payload's checksum is that of the
ciphertext: damage can be told without a key.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_redis.chunks.frame import HEADER_BYTES, SEAL_AT, SEAL_BYTES, SEAL_KEY_ID_BYTES
from lmcache_redis.errors import ConfigError

if TYPE_CHECKING:
    from lmcache_redis.seal.xaes import Xaes256Gcm

_KEY_BYTES = 32
_KEY = re.compile(r"[0-9a-fA-F]{64}")
_NONCE_BYTES = 24
_TAG_BYTES = 16
_KEY_ID = slice(SEAL_AT, SEAL_AT + SEAL_KEY_ID_BYTES)
_NONCE = slice(_KEY_ID.stop, _KEY_ID.stop + _NONCE_BYTES)
_TAG = slice(_NONCE.stop, _NONCE.stop + _TAG_BYTES)
assert _TAG.stop == HEADER_BYTES
assert _TAG.stop - SEAL_AT == SEAL_BYTES
# Not known before the payload is encrypted: both checksums and the tag.
_NOT_ASSOCIATED = (slice(56, 64), slice(168, 176), _TAG)
_HOW = "write 64 hex digits, as `openssl rand -hex 32` prints them"


class Opened(enum.Enum):
    """What became of a sealed payload; only OK leaves it readable."""

    OK = "opened"
    UNKNOWN_KEY = "sealed with a key that is not in the key file"
    FORGED = "not what was sealed, or under another key of Redis"


class SealKeys:
    """Keys of 32 bytes: the first seals, all of them open. Thread-safe. Raises ConfigError.

    Attributes:
        tenants: a secret that the first key gives (`tenants.shown`).
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys or any(len(key) != _KEY_BYTES for key in keys):
            raise ConfigError(f"a seal needs keys of {_KEY_BYTES} bytes")
        try:
            from lmcache_redis.seal.xaes import Xaes256Gcm
        except ImportError as error:
            raise ConfigError(
                f"sealed values need the package cryptography ({error}): "
                "pip install 'cryptography>=50,<51'"
            ) from error
        self._ciphers: dict[bytes, Xaes256Gcm] = {_id_of(key): Xaes256Gcm(key) for key in keys}
        self.ids = tuple(self._ciphers)
        self.tenants = sha256(b"lmcr2.seal.tenants" + keys[0]).digest()

    def __repr__(self) -> str:
        return f"SealKeys({', '.join(key_id.hex() for key_id in self.ids)})"

    def seal(
        self, key: bytes, header: bytearray, payload: memoryview, room: memoryview
    ) -> memoryview:
        """Encrypt a payload into `room`, complete its header, and return the ciphertext."""
        key_id, nonce = self.ids[0], os.urandom(_NONCE_BYTES)
        header[_KEY_ID], header[_NONCE] = key_id, nonce
        sealed = room[: payload.nbytes]
        cipher = self._ciphers[key_id]
        header[_TAG] = cipher.encrypt(nonce, payload, bytes(header) + key, sealed)
        return sealed

    def open(self, key: bytes, header: bytes, payload: memoryview) -> Opened:
        """Decrypt a payload in place. Unless OK is returned, none of it may be used."""
        cipher = self._ciphers.get(header[_KEY_ID])
        if cipher is None:
            return Opened.UNKNOWN_KEY
        bare = bytearray(header)
        for field in _NOT_ASSOCIATED:
            bare[field] = bytes(field.stop - field.start)
        good = cipher.decrypt(header[_NONCE], payload, bytes(bare) + key, header[_TAG])
        return Opened.OK if good else Opened.FORGED


def read_seal_keys(path: str | None) -> SealKeys | None:
    """The keys of ``--seal-key-file``, if it is given. Raises ConfigError without quoting it."""
    return SealKeys(_keys_of(path, _private_text(path))) if path else None


def _id_of(key: bytes) -> bytes:
    return sha256(b"lmcr2.seal.key-id" + key).digest()[:SEAL_KEY_ID_BYTES]


def _private_text(path: str) -> str:
    """The file, unless others can read it. A secret of Kubernetes is readable by its group."""
    try:
        with Path(path).open(encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except UnicodeDecodeError:
        raise ConfigError(f"--seal-key-file {path} contains no keys: {_HOW}, one a line") from None
    except OSError as error:
        raise ConfigError(
            f"--seal-key-file {path} cannot be read ({error.strerror}): name another one"
        ) from error
    if mode & 0o027:
        raise ConfigError(
            f"--seal-key-file {path} is open to others: run `chmod g-w,o-rwx {path}`, and use "
            "another key if they may have read it"
        )
    return text


def _keys_of(path: str, text: str) -> list[bytes]:
    """Each line is a key in hex; empty ones and those that begin with # are skipped."""
    keys: list[bytes] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        if not _KEY.fullmatch(words):
            raise ConfigError(f"line {number} of --seal-key-file {path} is no key: {_HOW}")
        key = bytes.fromhex(words)
        if key in keys:
            raise ConfigError(f"line {number} of --seal-key-file {path} repeats a key: remove it")
        keys.append(key)
    if not keys:
        raise ConfigError(f"--seal-key-file {path} contains no key: {_HOW}")
    return keys
