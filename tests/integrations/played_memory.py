# SPDX-License-Identifier: Apache-2.0
"""The contents of a played engine's blocks, and of the played agent's parts.

The KV of a token is a digest of the tokens up to it, and a state is the digest of all tokens before
it. So a step that reads KV which is not there is noticed, and so is a store that reads a block
which has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import CircularBufferSpec
from vllm.v1.request import Request

from lmcache_redis.cache.pacing import PrefixNeeds
from lmcache_redis.client.scheduler import Ranks
from lmcache_redis.client.worker import TransferOp
from lmcache_redis.integrations.vllm.support import LayerGroup


class Agent:
    """What the cache holds: the blocks of each part, by group and name. Also the adapter."""

    def __init__(self, groups: Sequence[LayerGroup], chunk_tokens: int) -> None:
        self.ranks = Ranks(1)
        self.parts: dict[tuple[int, bytes], tuple[Any, ...]] = {}
        self.pinned: dict[str, set[tuple[int, bytes]]] = {}
        self.was_pinned: dict[str, set[tuple[int, bytes]]] = {}
        self._groups = groups
        self._chunk_tokens = chunk_tokens
        self._answers: dict[str, int] = {}
        self.canary_every = 0
        self.names_before = False
        self.compare_only = False
        self.cleared: list[bytes] = []

    def clear(self, epoch: bytes) -> None:
        self.cleared.append(epoch)

    def chunk_size_tokens(self) -> int:
        return self._chunk_tokens

    def begin_lookup(
        self,
        request_id: str,
        names: Sequence[bytes],
        first_chunk: int,
        before: Sequence[bytes],
        token_s: float,
        busy_s: float,
        tenant: str,
        stored_tokens: int,
    ) -> None:
        if request_id in self._answers:
            return
        reaches = [group.reach for group in self._groups]
        needs = PrefixNeeds(reaches, first_chunk, self._chunk_tokens)
        hit = needs.longest(len(names), lambda part: (part[1], names[part[0]]) in self.parts)
        pinned = {(row, names[chunk]) for chunk, row in needs.parts(hit)}
        self.pinned[request_id] = pinned
        self.was_pinned[request_id] = self.was_pinned.get(request_id, set()) | pinned
        self._answers[request_id] = (first_chunk + hit) * self._chunk_tokens if hit else 0

    def hit_tokens(self, request_id: str, wait_s: float) -> int | None:
        return 0 if self.compare_only else self._answers.get(request_id, 0)

    def pinned_tokens(self, request_id: str) -> int:
        return self._answers.get(request_id, 0)

    def hit_tiers(self, request_id: str) -> Sequence[str]:
        return ()

    def forget_lookup(self, request_id: str) -> None:
        self._answers.pop(request_id, None)

    def release_lookup(self, request_id: str) -> None:
        self.pinned.pop(request_id, None)

    def end_session(self, request_id: str) -> None:
        self._answers.pop(request_id, None)

    def shutdown(self) -> None:
        pass


class Memory:
    """The blocks of all groups. left_out: groups that no load fills, by vLLM's number."""

    def __init__(
        self,
        pool: Any,
        groups: Sequence[LayerGroup],
        left_out: Sequence[tuple[int, Any]],
        hash_tokens: int,
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._left_out = left_out
        self._hash_tokens = hash_tokens
        # A list of digests, one a token, or the digest of a state.
        self._blocks: dict[int, Any] = {}
        self._by_hash: dict[bytes, list[int]] = {}  # vLLM's hash: the digests up to there

    def digests(self, tokens: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        """Of ``tokens``, behind those whose digests are ``before``."""
        found, last = list(before), before[-1] if before else 0
        for token in tokens[len(found) :]:
            last = hash((last, token))
            found.append(last)
        return found

    def learn(self, request: Request) -> None:
        """What the blocks that vLLM's hashes name must contain."""
        hashes = request.block_hashes
        if hashes and hashes[-1] not in self._by_hash:
            digests = self.digests(request.all_token_ids)
            for number, name in enumerate(hashes):
                self._by_hash.setdefault(name, digests[: (number + 1) * self._hash_tokens])

    def prepare(self, zeroed: Sequence[int], copies: Sequence[Any]) -> None:
        """What a step does to blocks before it computes."""
        for block_id in zeroed:
            self._blocks[block_id] = None
        for copy in copies:
            self._blocks[copy.dst_block_id] = self._blocks.get(copy.src_block_id)

    def compute(
        self,
        name: str,
        table: Sequence[Sequence[int]],
        digests: Sequence[int],
        step: range,
        replay_start: int,
    ) -> None:
        """Reads the KV that a step needs, and writes that of its tokens, ``step``.

        replay_start: groups that nothing loads have no token before it.
        """
        begin, end = step.start, step.stop
        for group in self._groups:
            ids, size = table[group.number], group.block_size_tokens
            if group.is_state:
                if begin:
                    found = self._blocks.get(ids[(begin - 1) // size])
                    assert found == digests[begin - 1], f"{name}: state of {begin}"
                self.write(ids[(end - 1) // size], digests[end - 1])
                continue
            first = group.reach.first_token(begin)
            self._check_tokens(name, ids, size, digests, range(first, begin))
            self._write_tokens(ids, size, digests, step)
        for number, spec in self._left_out:
            ids, size = table[number], spec.block_size
            if isinstance(spec, CircularBufferSpec):
                # Tokens are compressed in groups of half a block.
                first, ids = begin - begin % (size // 2), list(ids) * (end // size + 1)
            else:
                first = max(0, begin - spec.sliding_window + 1, replay_start)
            self._check_tokens(name, ids, size, digests, range(first, begin))
            self._write_tokens(ids, size, digests, step)

    def _check_tokens(
        self, name: str, ids: Sequence[int], size: int, digests: Sequence[int], tokens: range
    ) -> None:
        for token in tokens:
            content = self._content(ids[token // size], size)
            assert content[token % size] == digests[token], f"{name}: token {token} is not there"

    def _write_tokens(
        self, ids: Sequence[int], size: int, digests: Sequence[int], tokens: range
    ) -> None:
        first = tokens.start
        while first < tokens.stop:
            stop = min(tokens.stop, first - first % size + size)
            content = list(self._content(ids[first // size], size))
            content[first % size : first % size + stop - first] = digests[first:stop]
            self.write(ids[first // size], content)
            first = stop

    def _content(self, block_id: int, size: int) -> list[Any]:
        """Of the tokens of a block; None where something else is."""
        content = self._blocks.get(block_id)
        return content if isinstance(content, list) and len(content) == size else [None] * size

    def write(self, block_id: int, content: Any) -> None:
        assert not self._pool.blocks[block_id].is_null
        self._blocks[block_id] = content

    def read(self, op: TransferOp) -> dict[bytes, tuple[Any, ...]]:
        """The parts that a store reads, each of which is what its name says."""
        group = self._groups[op.group]
        per_part, size = len(op.block_ids) // len(op.hashes), group.block_size_tokens
        found = {}
        for number, name in enumerate(op.hashes):
            ids = op.block_ids[number * per_part : (number + 1) * per_part]
            found[name] = content = tuple(self._blocks.get(block_id) for block_id in ids)
            digests = self._by_hash[name[-32:]]  # after the epoch
            expected: tuple[Any, ...] = (digests[-1],)
            if not group.is_state:
                last = digests[-per_part * size :]
                expected = tuple(last[n * size : (n + 1) * size] for n in range(per_part))
            assert content == expected, f"a store of group {group} reads what it should not"
        return found
