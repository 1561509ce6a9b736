# SPDX-License-Identifier: Apache-2.0
"""What a connector is made of, from the settings of its engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_redis.chunks.metadata import dtype_name
from lmcache_redis.client.registering import CacheGroup, SentRegistration
from lmcache_redis.client.scheduler import FIRST_COMPARED, SchedulerClient
from lmcache_redis.client.worker import WorkerClient
from lmcache_redis.config import ClientConfig
from lmcache_redis.device.shares import HeadShares
from lmcache_redis.errors import DeviceError, LMCacheRedisError
from lmcache_redis.integrations.vllm import needs
from lmcache_redis.integrations.vllm.engine import Engine, recompute_failed_loads
from lmcache_redis.integrations.vllm.epoch import Epochs
from lmcache_redis.integrations.vllm.identity.engine_identity import (
    attention_backend,
    engine_id,
    engine_identity,
    model_name,
    require_looks,
)
from lmcache_redis.integrations.vllm.identity.heads import cut_by_head
from lmcache_redis.integrations.vllm.identity.lora import AdapterDigests
from lmcache_redis.integrations.vllm.identity.probe import probe
from lmcache_redis.integrations.vllm.identity.versions import pairs_of_version
from lmcache_redis.integrations.vllm.parameters import UNREAD
from lmcache_redis.integrations.vllm.planning import BlockReferences, StepPlanner
from lmcache_redis.integrations.vllm.reports.stats import Recorder
from lmcache_redis.integrations.vllm.requests import CachePolicy, MediaNames, RequestNames
from lmcache_redis.integrations.vllm.scheduler import ConnectorScheduler
from lmcache_redis.integrations.vllm.support import (
    LayerGroup,
    adapters_only,
    block_strides,
    has_heads,
    left_out_groups,
    may_load,
    shard_of_rank,
    supported_groups,
    total_kv_heads,
)

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lmcache_redis.integrations.vllm.reports.events import Announcer

logger = logging.getLogger("vllm.lmcache_redis")

_T = TypeVar("_T")


def _speaks_for_its_node(parallel: ParallelConfig) -> bool:
    """Whether this worker is the first one of a node that has no scheduler of its engine.

    Where Ray puts workers is not known: there all of them speak.
    """
    if parallel.distributed_executor_backend != "mp":
        return bool(parallel.use_ray)
    nodes: int = needs.NODES.of(parallel)
    workers = parallel.world_size // nodes
    return nodes > 1 and parallel.rank >= workers and parallel.rank % workers == 0


@dataclass(frozen=True)
class SetUp:
    """What is found out at the start. beside_others: in a MultiConnector, if
    this is the scheduler's process.

    made: parts of the identity, and how groups are cut: they are made once.
    """

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    config: ClientConfig
    beside_others: bool
    groups: Sequence[LayerGroup]
    made: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, connector: KVConnectorBase_V1, *, takes_failed_loads: bool) -> SetUp:
        """Raises LMCacheRedisError if the settings are wrong, or the engine cannot be cached."""
        vllm_config, kv_cache_config = (
            needs.CONNECTOR_CONFIG.of(connector),
            needs.CONNECTOR_KV_CACHE.of(connector),
        )
        extra = needs.CONNECTOR_TRANSFER.of(connector).kv_connector_extra_config
        config = ClientConfig.from_extra_config(extra)
        beside_others = recompute_failed_loads(connector)
        groups = supported_groups(
            vllm_config, kv_cache_config, takes_failed_loads=takes_failed_loads
        )
        return cls(vllm_config, kv_cache_config, config, beside_others, groups)

    def scheduler_client(self) -> SchedulerClient:
        return SchedulerClient(**self._client_settings())

    def worker_client(self) -> WorkerClient:
        parallel = self.vllm_config.parallel_config
        return WorkerClient(
            **self._client_settings(),
            worker_id=parallel.rank,
            speaks=_speaks_for_its_node(parallel),
            on_registered=self._registered,
        )

    def _client_settings(self) -> dict[str, Any]:
        return {
            "endpoint": self.config.endpoint,
            "model_name": model_name(self.vllm_config),
            "world_size": self.vllm_config.parallel_config.world_size,
            "block_size_tokens": math.lcm(*(group.block_size_tokens for group in self.groups)),
            "engine_id": engine_id(self.vllm_config),
            "agent_dead_after_s": self.config.agent_dead_after_s,
        }

    def _registered(self, registration: SentRegistration) -> None:
        """On the link's thread. Says in vLLM's log that the cache works."""
        logger.info(
            "the cache is on: model %s, rank %d, layout %s, chunks of %d tokens, the agent is "
            "process %d at %s",
            model_name(self.vllm_config),
            self.vllm_config.parallel_config.rank,
            " and ".join(part.fingerprint.hex()[:16] for part in registration.place.parts),
            registration.chunk_tokens,
            registration.welcome.agent_pid,
            self.config.endpoint,
        )

    def scheduler(
        self,
        client: SchedulerClient,
        engine: Engine,
        manager: KVCacheManager,
        references: BlockReferences,
        recorder: Recorder,
        announcer: Announcer | None,
    ) -> ConnectorScheduler:
        config, transfer = self.config, self.vllm_config.kv_transfer_config
        assert transfer is not None
        epochs = Epochs(
            config.weights_id,
            config.weights_run,
            engine.parameters if config.check_weights else lambda: UNREAD,
        )
        planner = StepPlanner(
            references,
            self.groups,
            left_out_groups(self.kv_cache_config),
            self.vllm_config.max_in_flight_tokens,
            lambda request_id: manager.get_blocks(request_id).blocks,
        )
        policy = CachePolicy(
            manager.block_pool.hash_block_size,
            loads=transfer.is_kv_consumer and may_load(self.vllm_config),
            stores=transfer.is_kv_producer,
            load_always=config.load_always,
            adapters_only=adapters_only(self.vllm_config),
            beside_others=self.beside_others,
            # Most of what a new engine hits, others have stored: after an upgrade, other versions.
            first_compared=FIRST_COMPARED if config.share_across_versions else 0,
        )
        parallel = self.vllm_config.parallel_config
        adapters = AdapterDigests(
            parallel.world_size, reads_again=needs.DATA_PARALLEL_SIZE.of(parallel) > 1
        )
        media = MediaNames(self.vllm_config)
        names = RequestNames(epochs, media, adapters)
        return ConnectorScheduler(client, planner, names, policy, recorder, announcer)

    def _once(self, part: str, make: Callable[[], _T]) -> _T:
        """What is made at the first registration."""
        if part not in self.made:
            self.made[part] = make()
        found: _T = self.made[part]
        return found

    def _cut(
        self, group: LayerGroup, kv_caches: Mapping[str, Any], strides: Mapping[str, int]
    ) -> tuple[HeadShares | None, dict[str, str]]:
        """How a group is cut into shares, and the pairs of these; None and none if it is not."""
        try:
            return cut_by_head(
                self.vllm_config,
                kv_caches,
                total_kv_heads(self.vllm_config.model_config),
                self.config.kv_shares,
                num_blocks=self.kv_cache_config.num_blocks,
                block_size_tokens=group.block_size_tokens,
                block_strides=strides,
            )
        except LMCacheRedisError as error:
            logger.warning(
                "KV cache group %d is not shared with other tensor-parallel sizes: %s",
                group.number,
                error,
            )
            return None, {}

    def _identity(self, unprobed: Sequence[str]) -> dict[str, str]:
        """The pairs of all groups. unprobed: why the version has to stay, if it has to."""
        versions = {}
        if self.config.share_across_versions:
            versions = pairs_of_version(self.vllm_config, unprobed)
        return engine_identity(
            self.vllm_config,
            rank=self.vllm_config.parallel_config.rank,
            backend=attention_backend(self.vllm_config),
            weights_id=self.config.weights_id,
            versions=versions,
        )

    def register(self, client: WorkerClient, kv_caches: Mapping[str, Any]) -> None:
        """Exports this rank's paged KV cache, and registers it with this and every later agent.

        Also after the engine has slept: what stayed in memory keeps the identity that it had.

        kv_caches: vLLM's tensors by layer; a recurrent layer has several. Raises DeviceError if the
        memory cannot be exported, Unsupported if its bytes cannot be identified.
        """
        vllm_config, kv_cache_config = self.vllm_config, self.kv_cache_config
        by_layer = block_strides(kv_cache_config)
        tensors: dict[str, dict[str, Any]] = {}  # by layer: a recurrent one has one for each state
        strides: dict[str, int] = {}
        for layer, cache in kv_caches.items():
            if isinstance(cache, (list, tuple)):
                tensors[layer] = {f"{layer}#{number}": state for number, state in enumerate(cache)}
            else:
                tensors[layer] = {layer: cache}
            if layer in by_layer:
                strides.update(dict.fromkeys(tensors[layer], by_layer[layer]))
        rank = vllm_config.parallel_config.rank
        if self.config.weights_id is None:
            require_looks(vllm_config)
        cache_groups, unprobed = [], []
        for group in self.groups:
            # With one group, layers that share the KV of another are listed as well.
            layers = group.layers if len(kv_cache_config.kv_cache_groups) > 1 else tensors
            some = {name: each for layer in layers for name, each in tensors.get(layer, {}).items()}
            if not some:
                raise DeviceError(f"this rank has no layer of KV cache group {group.number}")
            pairs = {}  # what decides the group's bytes
            if not group.is_state:  # states are plain tensors
                look = partial(
                    probe,
                    vllm_config,
                    some,
                    num_blocks=kv_cache_config.num_blocks,
                    block_size_tokens=group.block_size_tokens,
                    block_strides=strides,
                )
                found, kinds = self._once(f"group {group.number}", look)
                pairs = {**found}
                unprobed += [f"its layers ({each}) cannot be probed" for each in kinds]
            spec = kv_cache_config.kv_cache_groups[group.number].kv_cache_spec
            shard, shards, replicas = shard_of_rank(vllm_config, spec)
            if replicas > 1:
                pairs["rank"] = f"shard {shard} of {shards}"
            heads, replica = None, (rank % replicas, replicas)
            if self.config.share_across_tp and has_heads(spec):
                cut = partial(self._cut, group, some, strides)
                heads, of_shares = self._once(f"shares of group {group.number}", cut)
                pairs |= of_shares
                # If the cut fails on one rank alone, what it leaves to another is missing.
                replica = 0, 1
            cache_groups.append(
                CacheGroup(
                    some,
                    "+".join(dict.fromkeys(dtype_name(each.dtype) for each in some.values())),
                    group.block_size_tokens,
                    group.reach,
                    pairs,
                    shard=(shard, shards),
                    replica=replica,
                    heads=heads,
                )
            )
        client.register_groups(
            cache_groups,
            num_blocks=kv_cache_config.num_blocks,
            identity=self._once("engine", partial(self._identity, unprobed)),
            block_strides=strides,
        )
