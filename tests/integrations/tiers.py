# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, connector, tiers, region and layouts around KV that a test fills.

No model runs. The scheduler's connector makes the tier as in an engine. A test then calls vLLM's
manager as the connector does, step by step.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_redis.integrations import vllm as plugin
from lmcache_redis.integrations.vllm import making
from lmcache_redis.integrations.vllm.identity.engine_identity import look_at_files
from tests.integrations.test_identity import LLAMA, write_model
from tests.servers import WAIT_S

HEADS, HEAD_SIZE, BLOCK, BLOCKS = 2, 16, 16, 8
LAYERS = ("layer.0", "layer.1")
PER_CHUNK = 2  # blocks
WAIT = (LookupResult.RETRY, LookupResult.HIT_PENDING)

CONFIG = LLAMA | {
    "num_hidden_layers": len(LAYERS),
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 1024,
}


def make_files(directory: Path) -> Path:
    """The files of a model with random weights."""
    directory.parent.mkdir(exist_ok=True)
    return write_model(directory, CONFIG)


def key(number: int) -> Any:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def config_of(
    model: Path, extra: Mapping[str, Any], ranks: int, layout: str, rank: int, **named: Any
) -> tuple[VllmConfig, KVCacheConfig]:
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks, cache.kv_cache_layout = BLOCKS, layout
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype=named.get("dtype", "float32")
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(
            tensor_parallel_size=ranks, distributed_executor_backend="mp"
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=1024,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            engine_id=named.get("engine_id", "tests"),
            kv_connector_extra_config={
                "spec_name": "CPUTieringOffloadingSpec",
                "spec_module_path": "lmcache_redis.integrations.vllm_tier",
                "cpu_bytes_to_use": 1 << 20,
                "blocks_per_chunk": PER_CHUNK,
                **extra,
            },
        ),
    )
    vllm_config.cache_config.block_size = BLOCK
    vllm_config.cache_config.kv_cache_layout = layout
    vllm_config.parallel_config.rank = rank
    look_at_files(vllm_config)  # as each process does before it reads the model
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=max(1, HEADS // ranks),
        head_size=HEAD_SIZE,
        dtype=torch.float32,
    )
    groups = [KVCacheGroupSpec(list(LAYERS), spec)]
    return vllm_config, KVCacheConfig(BLOCKS, [], groups, kv_cache_layout=layout)


class _Executor:
    def __init__(self, vllm_config: VllmConfig, workers: Sequence[Any]) -> None:
        self.vllm_config, self._workers = vllm_config, workers

    def collective_rpc(self, function: Any, *_: Any) -> list[Any]:
        return [function(worker) for worker in self._workers] if callable(function) else []


class TierEngine(EngineCore):
    """As much of an engine as there is without a model. url: of Redis. tier: its other settings.

    ranks: tensor-parallel. layout: of a block in memory, LBNHC or LBHNC.
    """

    def __init__(
        self,
        model: Path,
        url: str,
        *,
        ranks: int = 1,
        layout: str = "LBHNC",
        tier: Mapping[str, Any] | None = None,
        dtype: str = "float32",
        lora: Any = None,
        **extra: Any,
    ) -> None:
        plugin.register()
        extra["secondary_tiers"] = [{"type": "redis", "url": url, **(tier or {})}]
        named = {"engine_id": uuid.uuid4().hex, "dtype": dtype}
        configs = [config_of(model, extra, ranks, layout, rank, **named) for rank in range(ranks)]
        self.vllm_config, kv_config = configs[0]
        self.vllm_config.lora_config = lora
        self.parameters = torch.nn.Linear(4, 4)
        runner = SimpleNamespace(kv_cache_config=kv_config, get_model=lambda: self.parameters)
        workers = [SimpleNamespace(vllm_config=each, model_runner=runner) for each, _ in configs]
        self.model_executor: Any = _Executor(self.vllm_config, workers)
        making.executors.add(self.model_executor)  # as its constructor does in an engine
        making.watch_schedulers()
        self.caches = [_kv_caches(max(1, HEADS // ranks), layout) for _ in configs]
        self.workers = []
        for (vllm_config, _), caches in zip(configs, self.caches, strict=True):
            spec = OffloadingSpecFactory.create_spec(
                build_offloading_config(vllm_config, kv_config)
            )
            worker = OffloadingConnectorWorker(spec, vllm_config, kv_config)
            worker.register_kv_caches(caches)
            self.workers.append(worker)
        self.scheduler: Any = Scheduler(
            self.vllm_config, kv_config, StructuredOutputManager(self.vllm_config), BLOCK, BLOCK
        )
        self.manager = self.scheduler.connector.connector_scheduler.manager
        self.tier = self.manager.secondary_tiers[0]
        self._ids = itertools.count()

    def __enter__(self) -> TierEngine:
        if self.tier._cache is not None:
            self.tier._cache.store.wait_probed(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def request(self) -> ReqContext:
        context = ReqContext(req_id=f"r{next(self._ids)}")
        self.manager.on_new_request(context)
        return context

    def put(self, keys: Sequence[Any], fill: Callable[[Sequence[int]], None]) -> None:
        """Stores chunks, which ``fill`` writes in the region: it is told their rows."""
        context = self.request()
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        assert prepared.keys_to_store == list(keys)
        fill([int(row) for row in prepared.store_spec.chunk_ids])
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)
        self.settle()

    def settle(self) -> None:
        ends_s = time.monotonic() + WAIT_S
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < ends_s
            time.sleep(0.001)
            self.step()

    def lookup(self, keys: Sequence[Any]) -> list[list[LookupResult]]:
        """All that lookups of each key say, until none has to be asked again."""
        context = self.request()
        said: list[list[LookupResult]] = [[] for _ in keys]
        ends_s = time.monotonic() + WAIT_S
        while not said[0] or any(each[-1] in WAIT for each in said):
            assert time.monotonic() < ends_s
            for each, results in zip(keys, said, strict=True):
                result = self.manager.lookup(each, context)
                if result not in results:
                    results.append(result)
            self.step()
            time.sleep(0.001)
        self.manager.on_request_finished(context)
        return said

    def hits(self, keys: Sequence[Any]) -> list[bool]:
        return [each[-1] is LookupResult.HIT for each in self.lookup(keys)]

    def rows(self, keys: Sequence[Any]) -> list[int]:
        """The rows of chunks that lookups have brought to the region."""
        context = self.request()
        found = self.manager.prepare_load(keys, context)
        self.manager.complete_load(keys, context)
        return [int(row) for row in found.chunk_ids]

    def write(self, content: bytes) -> Callable[[Sequence[int]], None]:
        """Fills the rows of the region with pieces of ``content``."""

        def fill(rows: Sequence[int]) -> None:
            view, size = self.manager.primary_tier.get_kv_memoryview(), self.chunk_bytes
            for number, row in enumerate(rows):
                view.cast("B")[row * view.strides[0] :][:size] = content[number * size :][:size]

        return fill

    def read(self, keys: Sequence[Any]) -> bytes:
        view, size = self.manager.primary_tier.get_kv_memoryview(), self.chunk_bytes
        return b"".join(
            bytes(view.cast("B")[row * view.strides[0] :][:size]) for row in self.rows(keys)
        )

    @property
    def chunk_bytes(self) -> int:
        return int(self.tier._cache.form.chunk_bytes)

    def copy(
        self, blocks: Sequence[int], rows: Sequence[int], *, to_region: bool, skip: int = 0
    ) -> None:
        """What the workers do in a step: blocks, and the chunks that they are parts of.

        skip: blocks at the begin of the first chunk.
        """
        engine = GPULoadStoreSpec(list(blocks), [len(blocks)], [skip])
        for worker in self.workers:
            assert worker.worker is not None
            region = CPULoadStoreSpec(list(rows))
            if to_region:
                worker.worker.submit_store(1, engine, region)
            else:
                worker.worker.submit_load(1, region, engine)
            (result,) = worker.worker.get_finished()
            assert result.success


def _kv_caches(heads: int, layout: str) -> dict[str, torch.Tensor]:
    """KV caches of a rank, of the shape that all layouts of vLLM have: blocks, heads, tokens."""
    caches = {}
    for layer in LAYERS:
        if layout == "LBNHC":
            memory = torch.zeros(BLOCKS, BLOCK, heads, 2 * HEAD_SIZE)
            caches[layer] = memory.permute(0, 2, 1, 3)
        else:
            caches[layer] = torch.zeros(BLOCKS, heads, BLOCK, 2 * HEAD_SIZE)
    return caches
