# SPDX-License-Identifier: Apache-2.0
"""What a worker registers with each agent: its exported KV cache, and the names of its parts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_redis import messages as m
from lmcache_redis.chunks.keys import share_rank
from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.client.scheduler import RankPlace
from lmcache_redis.device.context import export_kv_caches
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.shares import HeadShares
from lmcache_redis.device.signals import Signals
from lmcache_redis.processes import has_ended, is_running

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.lmcache_redis")


@dataclass(frozen=True)
class CacheGroup:
    """The KV cache of one group of a worker's layers, which share their block ids.

    tensors: by name, in the order of a chunk's part. Each has a dimension that counts blocks.
    dtype: the name of the elements' type.
    block_size_tokens: tokens of one block; the chunk size is a multiple of it.
    reach: which parts of a prefix the engine needs after it.
    identity: what decides the bytes of this group's parts and not of the others.
    shard: number of this worker's share of the group's bytes, and how many shares there are; None:
        every worker has its own. Workers with equal shares hold equal bytes.
    replica: number of this worker among those with equal shares, and how many they are.
    heads: how the group is cut by head, in the place of ``shard``, for engines of every TP size if
        ``identity`` names none.
    """

    tensors: Mapping[str, torch.Tensor]
    dtype: str
    block_size_tokens: int
    reach: Reach = FULL_REACH
    identity: Mapping[str, str] = field(default_factory=dict)
    shard: tuple[int, int] | None = None
    replica: tuple[int, int] = (0, 1)
    heads: HeadShares | None = None

    def kv_rank(self, worker_id: int, world_size: int) -> int:
        if self.heads is not None:
            return share_rank(self.heads.count, self.heads.shares[0].number, len(self.heads.shares))
        number, count = self.shard or (worker_id, world_size)
        return share_rank(count, number)


@dataclass(frozen=True)
class ExportedMemory:
    """What is registered with each agent. signals: of the memory's GPU; None on the CPU."""

    groups: Sequence[CacheGroup] = ()
    layouts: Sequence[KVLayout] = ()
    storages: tuple[m.StorageHandle, ...] = ()
    signals: Signals | None = None

    @classmethod
    def of(
        cls,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        identity: Mapping[str, str],
        block_strides: Mapping[str, int] | None,
    ) -> ExportedMemory:
        """Raises ``DeviceError``."""
        tensors = [group.tensors for group in groups]
        cuts = [group.heads for group in groups]
        exported = export_kv_caches(tensors, num_blocks, block_strides, cuts)
        layouts = [
            KVLayout(
                identity=tuple(sorted({**identity, **group.identity, **_cut(group)}.items())),
                dtype=group.dtype,
                device=exported.device,
                block_size_tokens=group.block_size_tokens,
                num_blocks=num_blocks,
                segments=pages.segments,
                page_format=pages.page_format,
                reach=group.reach,
                pages=pages.pages,
                shares=len(group.heads.shares) if group.heads else 0,
            )
            for group, pages in zip(groups, exported.groups, strict=True)
        ]
        return cls(groups, layouts, exported.storages, exported.signals)

    def named(self, worker_id: int, world_size: int, chunk_tokens: int) -> tuple[m.KVGroup, ...]:
        """The groups to register, with the rank and the fingerprint that name their parts."""
        named = []
        for group, layout in zip(self.groups, self.layouts, strict=True):
            fingerprint = layout.fingerprint(chunk_tokens)
            kv_rank = group.kv_rank(worker_id, world_size)
            named.append(m.KVGroup(kv_rank, layout, fingerprint))
        return tuple(named)


def _cut(group: CacheGroup) -> Mapping[str, str]:
    return {} if group.heads is None else {"kv_shares": str(group.heads.count)}


@dataclass(eq=False)
class SentRegistration:
    """A registration of a worker's memory with the agent of a WELCOME.

    number: a later registration of this process has a higher one.
    is_mapped: the agent has mapped the memory. refusal: why the memory cannot be used.
    agent_is_visible: whether ``/proc`` shows the agent's process, while it is certainly alive. One
        in another PID namespace is not visible, so its absence proves nothing.
    """

    memory: ExportedMemory
    welcome: m.Welcome
    place: RankPlace
    chunk_tokens: int
    number: int = field(default_factory=itertools.count(1).__next__)
    is_mapped: bool = False
    refusal: str | None = None

    def __post_init__(self) -> None:
        self._agent = (self.welcome.agent_pid, self.welcome.agent_start_time)
        self.agent_is_visible = is_running(*self._agent)

    def agent_has_ended(self) -> bool:
        """Whether that is known."""
        return self.agent_is_visible and has_ended(*self._agent)

    def refuse(self, why: str) -> None:
        self.refusal = why
        logger.error("%s", why)
