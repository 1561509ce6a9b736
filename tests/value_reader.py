# SPDX-License-Identifier: Apache-2.0
"""A reader of keys and values in Redis, written from docs/reference/value-format.md alone.

It knows nothing of the package. What it needs besides the page is what its caller knows of the
model: how many KV heads it has, and how its attention backend orders a head.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

# Of the dtypes: those of KV. numpy has no bfloat16.
_DTYPES = {2: "<f2", 3: "<u2", 4: "<f4", 6: "u1"}
_UNDEFINED, _PAGES = 0, 0x4C52
_DESCRIPTIONS = hashlib.blake2b(b"lmcr2.layouts", digest_size=32).hexdigest()[:16].encode()

Array = NDArray[Any]
Place = Callable[[Array, Array, int, int], Array]


class Key(NamedTuple):
    namespace: bytes
    count: int  # of shares
    share: int
    model: str
    chunk_hash: bytes
    stripe: int


class Chunk(NamedTuple):
    """A share of a chunk. Pages are [tensors, (what divides a tensor,) blocks, sizes of a page]."""

    layout: bytes
    pages: Array


def read_key(data: bytes, prefix: bytes = b"") -> Key | None:
    """None for any other key than that of a stripe, and for descriptions of layouts."""
    start = prefix + b"lmcr2:"
    if not data.startswith(start) or data.startswith((start + b"claim:", start + b"tenant:")):
        return None
    namespace, rest = data[len(start) : len(start) + 16], data[len(start) + 16 :]
    if namespace == _DESCRIPTIONS:
        return None
    count, share, _, _, length = struct.unpack_from(">4BH", rest)
    model, rest = rest[6 : 6 + length].decode(), rest[6 + length :]
    digits = 2 * rest[0]
    assert (rest[1:2], rest[2 + digits : 3 + digits]) == (b"{", b"}")
    chunk_hash = bytes.fromhex(rest[2 : 2 + digits].decode())
    (stripe,) = struct.unpack(">H", rest[3 + digits :])
    return Key(namespace, count, share, model, chunk_hash, stripe)


def read_stripe(key: Key, value: bytes) -> tuple[bytes, bytes, bytes]:
    """The header and the payload of a stripe that is whole, and the id of its store."""
    header, payload = bytearray(value[:640]), value[640:]
    assert struct.unpack_from("<4sHH", header) == (b"LMCR", 2, 640)
    (index, stripes, flags) = struct.unpack_from("<HHI", header, 24)
    assert (index, flags) == (key.stripe, 0)
    assert index < stripes
    payload_bytes, offset, chunk_bytes, checksum = struct.unpack_from("<4Q", header, 32)
    assert header[97 : 97 + header[96]] == key.chunk_hash
    assert offset + payload_bytes <= chunk_bytes
    assert header[176] == 0, "it is packed"
    (stored_bytes,) = struct.unpack_from("<Q", header, 184)
    assert stored_bytes == len(payload) == payload_bytes
    assert xxh3_64_intdigest(payload) == checksum
    (of_header,) = struct.unpack_from("<Q", header, 168)
    struct.pack_into("<Q", header, 168, 0)
    assert xxh3_64_intdigest(bytes(header)) == of_header
    return bytes(header), payload, bytes(header[8:24])


def read_chunk(stripes: Mapping[Key, bytes]) -> Chunk:
    """stripes: all of one share of a chunk."""
    found = [read_stripe(key, stripes[key]) for key in sorted(stripes, key=lambda key: key.stripe)]
    headers, payloads, stores = zip(*found, strict=True)
    assert len({*stores}) == 1
    header, payload = headers[0], b"".join(payloads)
    count, layout = struct.unpack_from("<H", header, 26)[0], header[64:96]
    assert len(headers) == count
    nbytes, memory_format, groups = struct.unpack_from("<QII", header, 208)
    assert (nbytes, groups) == (len(payload), 1)
    assert memory_format in (_UNDEFINED, _PAGES)
    dtype, dimensions = struct.unpack_from("<II", header, 224)
    shape = struct.unpack_from(f"<{dimensions}Q", header, 232)
    return Chunk(layout, np.frombuffer(payload, _DTYPES[dtype]).reshape(shape))


def read_chunks(
    keys: Iterable[bytes], get: Callable[[bytes], bytes]
) -> dict[tuple[bytes, bytes], dict[int, Chunk]]:
    """By namespace and chunk hash, the shares by number."""
    stripes: dict[tuple[bytes, bytes, int], dict[Key, bytes]] = {}
    for name in keys:
        if (key := read_key(name)) is not None:
            place = key.namespace, key.chunk_hash, key.share
            stripes.setdefault(place, {})[key] = get(name)
    found: dict[tuple[bytes, bytes], dict[int, Chunk]] = {}
    for (namespace, chunk_hash, share), each in stripes.items():
        (count,) = {key.count for key in each}
        assert share < max(1, count)
        found.setdefault((namespace, chunk_hash), {})[share] = read_chunk(each)
    return found


# Where a head of T tokens and E numbers has element e of token t, of K and of V.
PLACES: dict[str, tuple[Place, Place]] = {
    "CPUs, vec": (
        lambda t, e, T, E: e * T + t,
        lambda t, e, T, E: T * E + t * E + e,
    ),
    "CPUs, amx": (
        lambda t, e, T, E: ((t // 16 * (E // 2) + e // 2) * 16 + t % 16) * 2 + e % 2,
        lambda t, e, T, E: T * E + ((e // 16 * (T // 2) + t // 2) * 16 + e % 16) * 2 + t % 2,
    ),
    "GPUs": (
        lambda t, e, T, E: t * 2 * E + e,
        lambda t, e, T, E: t * 2 * E + E + e,
    ),
    "segments": (
        lambda t, e, T, E: t * E + e,
        lambda t, e, T, E: t * E + e,
    ),
}


def keys_and_values(
    shares: Mapping[int, Chunk], heads: int, tokens: int, size: int, backend: str
) -> tuple[Array, Array]:
    """K and V of a chunk: [tensor, token, head, element].

    shares: all that the chunk has. heads: of the model. tokens: of a block. size: of a head.
    """
    assert sorted(shares) == [*range(len(shares))], "a share is missing"
    h, T, E = heads // len(shares), tokens, size
    D = 2 if backend == "segments" else 1
    t, e = np.arange(T)[:, None], np.arange(E)
    found: tuple[list[Array], list[Array]] = [], []
    for number in range(len(shares)):
        pages = shares[number].pages
        tensors, numbers = len(pages), pages.reshape(-1)
        B = len(numbers) // (tensors * h * T * E * 2)
        for d, (place, parts) in enumerate(zip(PLACES[backend], found, strict=True)):
            part = np.empty((tensors, B, T, h, E), numbers.dtype)
            for tensor, b, i in np.ndindex(tensors, B, h):
                start = (((tensor * D + d % D) * B + b) * h + i) * T * E * 2 // D
                part[tensor, b, :, i] = numbers[start + place(t, e, T, E)]
            parts.append(part.reshape(tensors, B * T, h, E))
    keys, values = (np.concatenate(parts, axis=2) for parts in found)
    return keys, values
