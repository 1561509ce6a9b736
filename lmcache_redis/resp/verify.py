"""What a value found under a stripe's key is worth. Pure.

The value counts only when its header is exactly the expected one and its payload has the
checksum that the header names, hashed here while the bytes are warm from the socket.

What is wrong is either ours beyond doubt, and then its chunk is to be removed: a whole
header of this very chunk (cut into stripes otherwise, or moved), or a damaged one that has
our magic and version. Or it may be somebody else's, and is left alone: another type,
another magic or version, another layout or chunk, no header at all.
"""

from __future__ import annotations

from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from lmcache_redis.errors import FormatError
from lmcache_redis.resp.bulk import Found
from lmcache_redis.resp.outcomes import ReadOutcome
from lmcache_redis.stripe import ChunkFrame, Verdict, describe_header

_MAGIC = b"LMCR"
_OF_THIS_CHUNK = frozenset({Verdict.WRONG_SIZE, Verdict.WRONG_STRIPE})


class Verified(NamedTuple):
    """outcome None: the stripe is good, of the store `store_id`.

    remove_stripes: 0, or how many stripes of the chunk to remove.
    """

    outcome: ReadOutcome | None
    store_id: bytes = b""
    remove_stripes: int = 0


def verify(
    frame: ChunkFrame,
    index: int,
    found: Found,
    header: memoryview,
    payload: memoryview,
    checksums: bool = True,
) -> Verified:
    """Judge what `BulkConnection.get_stripe` found for stripe `index` of `frame`'s chunk.

    checksums: whether the payload is hashed and compared as well.
    """
    if found is Found.NOTHING:
        return Verified(ReadOutcome.INCOMPLETE, remove_stripes=frame.stripe_count)
    if found is Found.OTHER_TYPE:
        return Verified(ReadOutcome.FOREIGN)
    check = frame.check_header(header, index)
    if check.ok and found is Found.VALUE:
        if not checksums or xxh3_64_intdigest(payload) == check.checksum:
            return Verified(None, check.store_id)
        return Verified(ReadOutcome.CORRUPT, remove_stripes=frame.stripe_count)
    if check.verdict in _OF_THIS_CHUNK:
        return Verified(ReadOutcome.FOREIGN, remove_stripes=_stripes(frame, header))
    # Cut short before the version, a header says CORRUPT_HEADER too: the magic decides.
    if check.ok or (check.verdict is Verdict.CORRUPT_HEADER and header[:4] == _MAGIC):
        return Verified(ReadOutcome.CORRUPT, remove_stripes=frame.stripe_count)
    return Verified(ReadOutcome.FOREIGN)


def _stripes(frame: ChunkFrame, header: memoryview) -> int:
    """All stripes of the chunk, however it was cut."""
    try:
        return max(frame.stripe_count, describe_header(header).stripe_count)
    except FormatError:
        return frame.stripe_count
