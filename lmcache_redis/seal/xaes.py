# SPDX-License-Identifier: Apache-2.0
"""XAES-256-GCM: AES-256-GCM with nonces of 192 bits, https://c2sp.org/XAES-256-GCM.

A nonce of 192 bits may be drawn at random for every message, by any number of processes that share
a key. The key of each message is derived from the key and the first half of the nonce (NIST SP
800-108r1 in counter mode, with CMAC as its function); the second half is the nonce of AES-GCM.

`cryptography` 50 is the first version that computes without the GIL.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.kdf.kbkdf import KBKDFCMAC, CounterLocation, Mode

_KEY_BYTES = 32
_HALF_BYTES = 12  # of a nonce


class Xaes256Gcm:
    """The cipher with one key of 32 bytes. Thread-safe."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def encrypt(self, nonce: bytes, data: memoryview, associated: bytes, into: memoryview) -> bytes:
        """Write the ciphertext of `data`, which is as long, to `into`; return the tag."""
        encryptor = Cipher(self._message_key(nonce), GCM(nonce[_HALF_BYTES:])).encryptor()
        encryptor.authenticate_additional_data(associated)
        encryptor.update_into(data, into)
        encryptor.finalize()
        return encryptor.tag

    def decrypt(self, nonce: bytes, data: memoryview, associated: bytes, tag: bytes) -> bool:
        """Decrypt `data` in place; False if it is not what was encrypted: then it is garbage."""
        mode = GCM(nonce[_HALF_BYTES:], tag)
        decryptor = Cipher(self._message_key(nonce), mode).decryptor()
        decryptor.authenticate_additional_data(associated)
        decryptor.update_into(data, data)
        try:
            decryptor.finalize()
        except InvalidTag:
            return False
        return True

    def _message_key(self, nonce: bytes) -> AES:
        fixed = b"X\0" + nonce[:_HALF_BYTES]
        mode, location = Mode.CounterMode, CounterLocation.BeforeFixed
        derived = KBKDFCMAC(AES, mode, _KEY_BYTES, 2, None, location, None, None, fixed)
        return AES(derived.derive(self._key))
