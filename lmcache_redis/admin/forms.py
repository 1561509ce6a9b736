# SPDX-License-Identifier: Apache-2.0
"""How large chunks are: plain, as they are stored, and as they would be if they were packed.

Chunks of one form (layout, model, worker) are cut alike, as any header says. How far they are
packed differs: one is taken for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lmcache_redis.admin.server import PrimaryServers
from lmcache_redis.admin.stripes import Form, SeenChunk, Stripe, read_stripes
from lmcache_redis.chunks.frame import HEADER_BYTES, StripeHeader
from lmcache_redis.errors import RedisError
from lmcache_redis.resp.codecs import elements_of, pack

# Chunks of a form that are looked at until one has a valid header.
_ATTEMPTS = 16
# Of that chunk, those that say how far it is packed.
_MOST_STRIPES = 64
# Of a stripe, as much is packed to see what that saves.
_MOST_PACKED = 1 << 20
_PACKED_RANGE = (HEADER_BYTES, HEADER_BYTES + _MOST_PACKED - 1)


class Sample(NamedTuple):
    """A chunk of a form, a header of it, and which share of its payload is stored."""

    chunk: SeenChunk
    header: StripeHeader
    share: float


class Sizes(NamedTuple):
    """Of values, headers included: as they are stored, and as they would be without packing."""

    stored: int = 0
    plain: int = 0

    def __add__(self, other: object) -> Sizes:
        if not isinstance(other, Sizes):
            return NotImplemented
        return Sizes(self.stored + other.stored, self.plain + other.plain)


NO_SIZES = Sizes()


def payload_of(header: StripeHeader) -> int:
    """The payload of each stripe of the chunk, but of the last, which may have less."""
    if header.stripe_index and header.stripe_index == header.stripe_count - 1:
        return header.payload_offset // header.stripe_index
    return header.payload_bytes


def size_of(header: StripeHeader, stripes: int) -> int:
    """Size of the values of these stripes (a bitmask) of the chunk, headers included."""
    payload, inside = payload_of(header), stripes & ((1 << header.stripe_count) - 1)
    total = inside.bit_count() * (HEADER_BYTES + payload)
    if inside >> (header.stripe_count - 1):
        total -= header.stripe_count * payload - header.chunk_bytes
    return total


def missing(header: StripeHeader, stripes: int) -> list[int]:
    """Indexes of the stripes of the chunk that this bitmask lacks."""
    return [index for index in range(header.stripe_count) if not stripes >> index & 1]


def sizes_of(sample: Sample, stripes: int) -> Sizes:
    """Of these stripes of a chunk of this form: the stored ones are an estimate if it is packed."""
    stripes &= (1 << sample.header.stripe_count) - 1
    plain = size_of(sample.header, stripes)
    headers = stripes.bit_count() * HEADER_BYTES
    return Sizes(headers + round((plain - headers) * sample.share), plain)


def sizes_read(stripes: Iterable[Stripe]) -> Sizes:
    """Of stripes that were read, those with a header of theirs."""
    own = [(each.value_bytes, each.own) for each in stripes if each.own]
    plain = sum(HEADER_BYTES + header.payload_bytes for _, header in own)
    return Sizes(sum(nbytes for nbytes, _ in own), plain)


def samples_of(server: PrimaryServers, chunks: Iterable[SeenChunk]) -> dict[Form, Sample]:
    """A sample of each form, of the first chunk with a valid header; a form without is left out.

    Counts as a use of the chunks that are read. Raises RedisError.
    """
    by_form: dict[Form, list[SeenChunk]] = {}
    for chunk in chunks:
        by_form.setdefault(chunk.form, []).append(chunk)
    samples: dict[Form, Sample] = {}
    for form, some in by_form.items():
        for chunk in some[:_ATTEMPTS]:
            (stripe,) = read_stripes(server, [(chunk.name, chunk.first)])
            if stripe.own is not None:
                others = [(chunk.name, index) for index in chunk.indexes[1:_MOST_STRIPES]]
                own = [s.own for s in (stripe, *read_stripes(server, others)) if s.own]
                stored = sum(header.stored_bytes for header in own)
                share = stored / sum(header.payload_bytes for header in own)
                samples[form] = Sample(chunk, stripe.own, share)
                break
    return samples


def savings(server: PrimaryServers, samples: Iterable[Sample]) -> dict[str, float]:
    """By model, the share of a stripe's bytes that packing would save; of some that are plain.

    Of sealed ones that is not known.
    """
    found: dict[str, float] = {}
    for each in samples:
        header, name = each.header, each.chunk.name
        if each.share < 1 or header.sealed_with is not None or name.key.model_name in found:
            continue
        key, nbytes = name.stripe(header.stripe_index), min(header.payload_bytes, _MOST_PACKED)
        try:
            ((payload,),) = server.ask_each([key], lambda key: [("GETRANGE", key, *_PACKED_RANGE)])
        except RedisError:
            continue
        if isinstance(payload, bytes) and len(payload) == nbytes:
            sizes, room = elements_of(header.metadata.serialize()), memoryview(bytearray(nbytes))
            _, used = pack(payload, sizes, room)
            found[name.key.model_name] = 1 - used / nbytes if used else 0.0
    return found


def find_missing(
    server: PrimaryServers, chunks: Iterable[tuple[SeenChunk, StripeHeader | None]]
) -> None:
    """Adds to each chunk the stripes that exist and were not seen. Raises RedisError."""
    asked = [
        (chunk, index)
        for chunk, header in chunks
        for index in (missing(header, chunk.stripes) if header else ())
    ]
    keys = [chunk.name.stripe(index) for chunk, index in asked]
    there = server.ask_each(keys, lambda key: [("EXISTS", key)])
    for (chunk, index), (is_there,) in zip(asked, there, strict=True):
        chunk.stripes |= (is_there == 1) << index
