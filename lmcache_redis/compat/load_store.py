# SPDX-License-Identifier: Apache-2.0
"""Operations as LMCache's adapters take them, the chunks that they name, and those in flight.

Callers name chunks by the hash of each block or by token ids, and may begin or end within a chunk.
The agent takes the hashes of whole chunks (`TransferOp`). Callers ask for results by request id.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

from lmcache_redis import messages as m
from lmcache_redis.chunks.keys import bounded_hash, hash_chunks
from lmcache_redis.client.scheduler import RankPlace
from lmcache_redis.client.worker import RetrieveTransfer, StoreTransfer, TransferOp
from lmcache_redis.errors import LMCacheRedisError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True)
class LoadStoreOp:
    """Tokens of one request, and the blocks to store or to load their KV.

    block_ids: ids of paged blocks in token order.
    token_ids: all tokens of the request up to ``end``, or more. The blocks hold those of
        ``[start, end)``, by default none.
    block_hashes: instead of tokens, the engine's hash of each of these blocks. They are chained:
        the hash of a block covers every token before it.
    skip_first_n_tokens: a load does not write the first blocks, those of this many tokens, because
        other requests may be reading them.

    Only whole chunks are stored and loaded; hashes and tokens may begin or end within one.
    Raises TypeError for hashes in place of token ids or the reverse, ValueError for inconsistent
    arguments.
    """

    block_ids: Sequence[int]
    token_ids: Sequence[int] | None = None
    block_hashes: Sequence[bytes] | None = None
    start: int = 0
    end: int = 0
    _: KW_ONLY
    skip_first_n_tokens: int = 0  # not in LMCache's class: vLLM gives it

    def __post_init__(self) -> None:
        check_names(self.token_ids, self.block_hashes)
        if self.block_hashes is not None and len(self.block_hashes) != len(self.block_ids):
            raise ValueError(
                f"{len(self.block_hashes)} block hashes for {len(self.block_ids)} blocks"
            )
        if self.token_ids is not None and not 0 <= self.start <= self.end <= len(self.token_ids):
            raise ValueError(
                f"tokens {self.start} to {self.end} of {len(self.token_ids)}: in token mode, start "
                "and end say which tokens the blocks hold"
            )

    def __len__(self) -> int:
        return len(self.block_ids)

    def whole_chunks(
        self, blocks_per_chunk: int, block_tokens: int, cache_salt: str | bytes = ""
    ) -> TransferOp:
        """The operation without parts of chunks at its ends.

        None of its blocks if their number leaves open which tokens they hold, which is logged.
        """
        nothing = TransferOp((), ())
        skipped = self.skip_first_n_tokens // block_tokens
        if self.block_hashes is not None:
            hashes = chunk_hashes(blocks_per_chunk, self.block_hashes)
            kept = len(hashes) * blocks_per_chunk
            return TransferOp(self.block_ids[:kept], hashes, skipped)
        assert self.token_ids is not None
        chunk_tokens = blocks_per_chunk * block_tokens
        start, end = -(-self.start // chunk_tokens), self.end // chunk_tokens
        if start >= end:
            return nothing
        before = self.start // block_tokens
        first, last = start * blocks_per_chunk - before, end * blocks_per_chunk - before
        most = -(-self.end // block_tokens) - before
        # Where the first block begins within the tokens, a block at the end may be left out.
        least = most if self.start % block_tokens else last
        if not least <= len(self.block_ids) <= most:
            logger.error(
                "%d blocks do not hold tokens %d to %d in blocks of %d: nothing is stored or "
                "loaded", len(self.block_ids), self.start, self.end, block_tokens,
            )  # fmt: skip
            return nothing
        hashes = token_hashes(chunk_tokens, self.token_ids[: end * chunk_tokens], cache_salt)
        return TransferOp(self.block_ids[first:last], hashes[start:], max(0, skipped - first))


def check_names(
    token_ids: Sequence[int] | None,
    block_hashes: Sequence[bytes] | None,
    cache_salt: str | bytes = "",
) -> None:
    """Checks that exactly one of both is given, of the right type, and a salt only with token ids.

    Raises TypeError or ValueError.
    """
    if (block_hashes is None) == (token_ids is None):
        raise ValueError("give exactly one of block_hashes and token_ids")
    if not isinstance(cache_salt, (str, bytes)):
        raise TypeError(f"a cache_salt is text or bytes, not {type(cache_salt).__name__}")
    if block_hashes is not None and cache_salt:
        raise ValueError("block hashes cover the salt: a cache_salt is for token_ids")
    # Only the first is checked: there may be thousands, and the agent checks each.
    if block_hashes is not None and len(block_hashes) and not isinstance(block_hashes[0], bytes):
        raise TypeError(
            f"a block hash is bytes, not {type(block_hashes[0]).__name__}: "
            "pass token ids as token_ids"
        )
    if token_ids is not None and len(token_ids) and isinstance(token_ids[0], bytes):
        raise TypeError("a token id is an int, not bytes: pass hashes as block_hashes")


def chunk_hashes(blocks_per_chunk: int, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
    """The names of the whole chunks among blocks: the hash of a chunk's last block, or its digest.

    Raises FormatError for an empty hash, and for what is not bytes.
    """
    return [bounded_hash(each) for each in block_hashes[blocks_per_chunk - 1 :: blocks_per_chunk]]


def token_hashes(
    chunk_tokens: int, token_ids: Sequence[int], cache_salt: str | bytes
) -> Sequence[bytes]:
    """The names of the whole chunks among tokens."""
    salt = cache_salt.encode() if isinstance(cache_salt, str) else cache_salt
    return hash_chunks(token_ids, chunk_tokens, salt=salt)


class LoadErrorsNotTaken(LMCacheRedisError):
    """Blocks were not loaded, and the engine goes on without having asked which."""


class BlockLoad:
    """The load of one operation: a retrieve, and if an agent is lost, another at the next one.

    place: where the engine's memory is registered. again: begins another retrieve, with the end of
    the first one's lease, beyond which there is none. left_out: blocks that the engine asked for
    and that are in no whole chunk.
    """

    def __init__(
        self,
        begun: RetrieveTransfer,
        begun_at: RankPlace | None,
        place: Callable[[], RankPlace | None],
        again: Callable[[int], RetrieveTransfer],
        left_out: Collection[int],
    ) -> None:
        self._last, self._last_at = begun, begun_at
        self._place, self._again = place, again
        self._left_out = left_out

    def ended(self) -> bool:
        """Whether nothing more comes. Begins another retrieve if that is due."""
        last = self._last
        if not last.over:
            return False
        if isinstance(last.call.answer, m.RetrieveResult) or time.monotonic_ns() > last.lease_ns:
            return True
        place = self._place()
        if place is not None and place is self._last_at:
            return True  # the agent has refused it
        if place is not None:
            self._last, self._last_at = self._again(last.lease_ns), place
        return False

    @property
    def failed_blocks(self) -> set[int]:
        return self._last.failed_blocks.union(self._left_out)


class RequestTransfers:
    """Transfers in flight by request id, and results that are not reported yet.

    may_store: False while an engine has not asked for the blocks of failed loads. Until then it may
        compute with them, and whatever it computes may depend on them.
    """

    def __init__(self) -> None:
        self.stores: dict[str, list[StoreTransfer]] = {}
        self._loads: dict[str, list[BlockLoad]] = {}
        self._held: set[str] = set()  # finished; the engine holds blocks for stores
        self._reported: set[str] = set()
        self._failed: dict[str, set[int]] = {}  # blocks that are not taken, by request

    @property
    def may_store(self) -> bool:
        return not self._failed

    def add_store(self, request_id: str, store: StoreTransfer) -> None:
        self.stores.setdefault(request_id, []).append(store)
        self._reported.discard(request_id)

    def add_load(self, request_id: str, load: BlockLoad) -> None:
        self._loads.setdefault(request_id, []).append(load)

    def finished(self, finished_by_engine: Iterable[str]) -> tuple[set[str], set[str]]:
        """See `LMCacheMPWorkerAdapter.get_finished`."""
        if self._failed:
            raise LoadErrorsNotTaken(
                f"{len(set().union(*self._failed.values()))} blocks of requests "
                f"{', '.join(sorted(map(str, self._failed)))} were not loaded and hold no valid "
                "KV, and the engine goes on: call get_block_ids_with_load_errors after each "
                "get_finished, and compute the tokens of these blocks again"
            )
        finished = set(finished_by_engine)
        self._reported &= finished
        self._held |= finished - self._reported
        for request_id, stores in _pop_ended(self.stores, lambda store: store.over).items():
            for store in stores:
                if isinstance(store.call.answer, m.Failure):
                    reason = store.call.answer.reason
                    logger.error("request %s was not stored: %s", request_id, reason)
        stored = self._held - self.stores.keys()
        self._held -= stored
        self._reported |= stored
        loaded = _pop_ended(self._loads, BlockLoad.ended)
        for request_id, loads in loaded.items():
            failed: set[int] = set().union(*(load.failed_blocks for load in loads))
            if failed:
                self._failed[request_id] = failed
                logger.error(
                    "request %s: %d blocks were not loaded and hold no valid KV",
                    request_id, len(failed),
                )  # fmt: skip
        return stored, set(loaded)

    def take_failed_blocks(self) -> set[int]:
        """Ids of blocks whose retrieve has failed since the last call."""
        failed, self._failed = self._failed, {}
        return set().union(*failed.values())


def _pop_ended(
    transfers: dict[str, list[_T]], has_ended: Callable[[_T], bool]
) -> dict[str, list[_T]]:
    """Removes and returns the requests whose transfers have all ended; each of them is asked."""
    ended = {
        request_id: each
        for request_id, each in transfers.items()
        if not [transfer for transfer in each if not has_ended(transfer)]
    }
    for request_id in ended:
        del transfers[request_id]
    return ended
