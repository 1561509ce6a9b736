"""How chunks are cut into stripes, so how large they are and what is missing of them.

Chunks of one form (layout, model, worker) are cut alike. A header says how, but where reading
one counts as a use, it would make a chunk look younger than it is: there the highest index
tells how many stripes there are, and MEMORY USAGE about how large they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_redis.admin.server import Server
from lmcache_redis.admin.stripes import BATCH_KEYS, read_stripes
from lmcache_redis.admin.survey import Form, SeenChunk
from lmcache_redis.stripe import HEADER_BYTES, StripeHeader

# Chunks of one form that are asked for a header before it is called unknown.
_ATTEMPTS = 16
# Stripes past the highest one seen that are looked for at a time.
_AHEAD = 32


@dataclass(frozen=True, slots=True)
class Cut:
    """How a chunk is cut into stripes. chunk_bytes 0: how large it is, is not known."""

    chunk_bytes: int
    stripe_payload_bytes: int
    stripe_count: int

    @staticmethod
    def of(header: StripeHeader) -> Cut:
        payload = header.payload_bytes
        if header.stripe_index and header.stripe_index == header.stripe_count - 1:
            payload = header.payload_offset // header.stripe_index
        return Cut(header.chunk_bytes, payload, header.stripe_count)

    def value_bytes(self, stripes: int) -> int:
        """Bytes of the values of these stripes (a bit each), headers included."""
        if not self.chunk_bytes:
            return 0
        inside = stripes & ((1 << self.stripe_count) - 1)
        total = inside.bit_count() * (HEADER_BYTES + self.stripe_payload_bytes)
        if inside >> (self.stripe_count - 1):
            total -= self.stripe_count * self.stripe_payload_bytes - self.chunk_bytes
        return total

    def missing(self, stripes: int) -> list[int]:
        """Indexes of the stripes that are not among these."""
        return [i for i in range(self.stripe_count) if not stripes >> i & 1]


def cuts_of(server: Server, chunks: Sequence[SeenChunk]) -> dict[Form, Cut]:
    """How the chunks of each form are cut; uses nothing. Raises RedisError.

    Exact where headers can be read without that counting as a use (a form without any whole
    header is left out then); elsewhere sizes are what the server's memory has, a little more.
    """
    by_form: dict[Form, list[SeenChunk]] = {}
    for chunk in chunks:
        by_form.setdefault(chunk.form, []).append(chunk)
    if server.untouched:
        return _read_cuts(server, by_form)
    return {form: _reckoned(server, of_form) for form, of_form in by_form.items()}


def _read_cuts(server: Server, by_form: dict[Form, list[SeenChunk]]) -> dict[Form, Cut]:
    """From the first whole header of each form."""
    cuts: dict[Form, Cut] = {}
    for form, some in by_form.items():
        for chunk in some[:_ATTEMPTS]:
            (stripe,) = read_stripes(server, [(chunk.name, chunk.first)])
            if stripe.is_ours and stripe.header is not None:
                cuts[form] = Cut.of(stripe.header)
                break
    return cuts


def present_of(server: Server, chunks: list[tuple[SeenChunk, Cut | None]]) -> list[int]:
    """For each chunk the stripes seen, and of the others those that are there (EXISTS)."""
    asked = [
        (at, index)
        for at, (chunk, cut) in enumerate(chunks)
        for index in (cut.missing(chunk.stripes) if cut else ())
    ]
    masks = [chunk.stripes for chunk, _ in chunks]
    for start in range(0, len(asked), BATCH_KEYS):
        batch = asked[start : start + BATCH_KEYS]
        keys = [chunks[at][0].name.stripe(index) for at, index in batch]
        replies = server.ask_all([(key, ("EXISTS", key)) for key in keys])
        for (at, index), reply in zip(batch, replies, strict=True):
            if reply == 1:
                masks[at] |= 1 << index
    return masks


def _reckoned(server: Server, chunks: list[SeenChunk]) -> Cut:
    """From the chunk with the highest stripe index, no value read."""
    chunk = max(chunks, key=lambda chunk: chunk.stripes)
    last, found = chunk.stripes.bit_length() - 1, [1]
    while any(found):
        ahead = [chunk.name.stripe(index) for index in range(last + 1, last + 1 + _AHEAD)]
        found = [reply == 1 for reply in server.ask_all([(k, ("EXISTS", k)) for k in ahead])]
        last += max((at for at, there in enumerate(found, start=1) if there), default=0)
    sized = [chunk.name.stripe(min(chunk.first, last)), chunk.name.stripe(last)]
    usages: list[Any] = server.ask_all([(key, ("MEMORY", "USAGE", key)) for key in sized])
    if not all(isinstance(usage, int) and usage > HEADER_BYTES for usage in usages):
        return Cut(0, 0, last + 1)
    each, final = (usage - HEADER_BYTES for usage in usages)
    return Cut(each * last + final, each, last + 1)
