# SPDX-License-Identifier: Apache-2.0
"""Redis behind SGLang's HiCache: a storage backend of its type ``dynamic``.

    python -m sglang.launch_server ... --enable-hierarchical-cache \
        --hicache-mem-layout page_first --hicache-storage-backend dynamic \
        --hicache-storage-backend-extra-config '{"backend_name": "redis", "interface_v1": 1,
        "module_path": "lmcache_redis.integrations.sglang", "class_name": "RedisHiCache",
        "url": "redis://cache.example:6379"}'

A page of a host pool is a chunk. Its pieces (K and V, or one for each layer) go straight between
the pool's memory and sockets. Pieces of another size, as of Mamba states, are chunks of their own.

SGLang's keys are hashes of tokens, salt, and the name and path of a LoRA adapter.
`RedisHiCache._identity` adds whatever else decides the bytes, so a page of another model, dtype,
layout or rank is a miss. What an adapter's files hold is in neither: with adapters the door is off,
unless the operator names them (``lora_id``).

Every call waits for its answer, on a thread of SGLang that is there for it; the memory of pages
belongs to the store until then. `RegionStore` answers by its deadlines.

Interface: SGLang 0.5.23, ``sglang/srt/mem_cache/hicache_storage.py``.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.version import __version__ as sglang_version

from lmcache_redis.chunks.metadata import dtype_name
from lmcache_redis.chunks.names import ChunkForm, opaque_pages
from lmcache_redis.errors import ConfigError
from lmcache_redis.regions import (
    Answer,
    DoorSettings,
    RegionChunk,
    RegionStore,
    answered,
    form_of,
)

logger = logging.getLogger(__name__)

Call = Callable[[Sequence[RegionChunk], Answer], None]

# What the extra config may hold for SGLang.
_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
# They arrange what lies on a device, and so in a host pool, and are in no attribute of a pool.
_DEVICE_LAYOUTS = ("SGLANG_USE_HND_KVCACHE", "SGLANG_AITER_KV_CACHE_LAYOUT")
_DTYPES = ("dtype", "conv_dtype", "temporal_dtype", "indexer_dtype")
_CONNECT_S = 2.0
_CLEAR_S = 30.0
_CLOSE_S = 5.0


class RedisHiCache(HiCacheStorage):
    """See the module. Raises ValueError with a sentence for settings and pools it cannot serve."""

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        given = dict(storage_config.extra_config or {})
        self._config = storage_config
        self._kv_dtype = str(given.pop("kv_dtype", ""))
        self._lora_id = given.pop("lora_id", "")
        self._settings = DoorSettings.of(given, _OF_SGLANG)
        self._pools: dict[str, HostPages] = {}
        if not storage_config.model_name:
            raise ConfigError("SGLang names no model: start it with --served-model-name")
        if not given.get("interface_v1"):
            raise ConfigError('set "interface_v1": 1, so that SGLang does not copy each page')
        if not isinstance(self._lora_id, str):
            raise ConfigError(f"lora_id is a text, not {self._lora_id!r}")
        self._is_off = not self._lora_id and _may_have_adapters()
        if self._is_off:
            logger.error(
                "every page is a miss, and none is stored: SGLang's keys have the name and path of "
                "a LoRA adapter alone; set lora_id to a name that no other set of adapters has"
            )
        self._store = RegionStore(self._settings)

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    def on_host_pools_registered(self) -> None:
        if not self._store.wait_probed(_CONNECT_S):
            why = self._store.why_down
            logger.warning("Redis cannot be used yet, so every page is a miss: %s", why)

    def _register(self, name: str, pool: Any) -> None:
        sizes, parts = _piece_bytes(name, pool), []
        for size in dict.fromkeys(sizes):
            places = [place for place, each in enumerate(sizes) if each == size]
            identity = {**self._identity(name, pool), "part": f"pieces {places} of {len(sizes)}"}
            metadata, views = opaque_pages(size * len(places)), len(places)
            model = self._config.model_name
            form = form_of(identity, model, 0, metadata, self._settings, views)
            parts.append((form, places))
        self._pools[name] = HostPages(pool, sizes, parts)

    def _identity(self, name: str, pool: Any) -> dict[str, str]:
        config = self._config
        adapters = {"adapters": self._lora_id} if self._lora_id else {}
        # Such pools are replicated if the model is MLA's; all others are divided between ranks.
        is_whole = config.is_mla_model and name != PoolName.MAMBA and not hasattr(pool, "head_num")
        layers = [getattr(pool, each, None) for each in ("start_layer", "end_layer", "layer_num")]
        return {
            "door": "sglang",
            "version": sglang_version,
            "weights": self._settings.weights_id,
            "pool": f"{name} {type(pool).__name__} {getattr(pool, 'storage_format_tag', None)}",
            "layout": f"{_layout(name, pool)} {[os.environ.get(each) for each in _DEVICE_LAYOUTS]}",
            "dtype": _dtype(name, pool, self._kv_dtype),
            "page_size": f"{pool.page_size} {config.logical_page_size}",
            "layers": str(layers),
            "tp": "whole" if is_whole else f"{config.tp_rank} {config.tp_size}",
            "pp": f"{config.pp_rank} {config.pp_size}",
            "cp": f"{config.attn_cp_rank} {config.attn_cp_size}",
            "dcp": f"{config.dcp_rank} {config.dcp_size}",
            **adapters,
        }

    # v1: pages of the KV pool

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return int(self.batch_exists_v2(keys).kv_hit_pages)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self.batch_get_v2([PoolTransfer(PoolName.KV, host_indices, keys=keys)])[PoolName.KV]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self.batch_set_v2([PoolTransfer(PoolName.KV, host_indices, keys=keys)])[PoolName.KV]

    # v2: pages of several pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        # Groups of blocks never gate the hit, and a pool without an answer counts as a miss.
        transfers = [
            each for each in pool_transfers or [] if each.hit_policy != PoolHitPolicy.BLOCK_GROUPS
        ]
        if any(each.name not in self._pools for each in transfers):
            return PoolTransferResult.empty()
        pools = [self._pools[name] for name in (PoolName.KV, *(each.name for each in transfers))]
        in_kv, *in_others = self._present(keys, pools)
        # The other pools alone decide where the KV pool has no memory.
        kv_pages = 0 if pools[0].is_logical and not transfers else _leading(in_kv)
        ends = {PoolName.KV: {*range(1, kv_pages + 1)}}
        for transfer, present in zip(transfers, in_others, strict=True):
            ends[transfer.name] = _restorable(transfer, present[:kv_pages])
        restorable = sorted(set.intersection(*ends.values()))
        hits = {name: max(each) for name, each in ends.items() if each}
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._move(transfers, self._store.load)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._move(transfers, self._store.store)

    def _move(self, transfers: Sequence[PoolTransfer], call: Call) -> dict[str, list[bool]]:
        """A page is good if all of its chunks are."""
        chunks: list[RegionChunk] = []
        moved: list[tuple[PoolTransfer, int, int]] = []
        results = {each.name: [False] * len(each.keys or ()) for each in transfers}
        if self._is_off:
            return results
        for transfer in transfers:
            try:
                pages = self._pools[transfer.name]
                some = pages.chunks(transfer.keys or (), transfer.host_indices)
            except (AssertionError, KeyError, ValueError) as error:
                logger.error("pages of SGLang's pool %s are not cached: %r", transfer.name, error)
                continue
            moved.append((transfer, len(chunks), len(pages.parts)))
            chunks += some
        good = answered(partial(call, chunks))
        for transfer, at, parts in moved:
            results[transfer.name] = _by_page(good[at:], parts, len(transfer.keys or ()))
        return results

    def _present(self, keys: Sequence[str], pools: Sequence[HostPages]) -> list[list[bool]]:
        """Which keys have a page, for each pool."""
        if self._is_off:
            return [[False] * len(keys) for _ in pools]
        names = [pages.names(keys) for pages in pools]
        there = answered(partial(self._store.lookup, [chunk for some in names for chunk in some]))
        found = []
        for pages, some in zip(pools, names, strict=True):
            mine, there = there[: len(some)], there[len(some) :]
            found.append(_by_page(mine, len(pages.parts), len(keys)))
        return found

    def _by_copies(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("pages go without a copy: SGLang does not call this")

    get = batch_get = set = batch_set = exists = _by_copies

    # The rest

    def clear(self) -> None:
        """Removes every page of this rank's pools. Raises RuntimeError if any may be left."""
        for pages in self._pools.values():
            for form, _ in pages.parts:
                if answered(partial(self._store.clear, form, _CLEAR_S)) != [True]:
                    why = self._store.why_down or "it did not answer in time"
                    raise RuntimeError(f"Redis may still hold pages: {why}")

    def close(self) -> None:
        self._store.close(_CLOSE_S)


class HostPages(NamedTuple):
    """The pages of a host pool. Pieces of one size are a chunk together.

    sizes: bytes of each piece of a page, none for a pool without memory. parts: of each chunk of a
    page its form, and which pieces it has.
    """

    pool: Any
    sizes: list[int]
    parts: list[tuple[ChunkForm, list[int]]]

    @property
    def is_logical(self) -> bool:
        """Whether it only counts pages, whose bytes are in other pools."""
        return not self.parts

    def names(self, keys: Sequence[str]) -> list[RegionChunk]:
        """All chunks of the first page, then of the next."""
        return [RegionChunk(form, key.encode()) for key in keys for form, _ in self.parts]

    def chunks(self, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[RegionChunk]:
        """As `names`, with their memory. Raises ValueError if the pool's pages have changed."""
        tokens = 0 if host_indices is None else len(host_indices)
        if tokens != len(keys) * self.pool.page_size:
            raise ValueError(f"{len(keys)} pages do not have {tokens} host indices")
        if self.is_logical:
            return []
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        if [*sizes] != self.sizes * len(keys):
            raise ValueError("the pages have other sizes than when the pool was registered")
        pieces = [_memory(*each) for each in zip(addresses, sizes, strict=True)]
        each_page = range(0, len(pieces), len(self.sizes))
        return [
            RegionChunk(form, key.encode(), [pieces[first + place] for place in places])
            for key, first in zip(keys, each_page, strict=True)
            for form, places in self.parts
        ]


def _piece_bytes(name: str, pool: Any) -> list[int]:
    """The sizes of the pieces of a page. Raises ConfigError for a pool that does not tell them."""
    try:
        meta = pool.get_page_buffer_meta(torch.zeros(pool.page_size, dtype=torch.int64))
        return [int(size) for size in meta[1]] if meta else []
    except (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the layout {getattr(pool, 'layout', None)} of SGLang's pool {name} does not tell "
            f"where a page lies ({error}): start SGLang with --hicache-mem-layout page_first"
        ) from error


def _layout(name: str, pool: Any) -> str:
    layout = getattr(pool, "layout", None)
    if not isinstance(layout, str) or not layout:
        raise ConfigError(f"SGLang's pool {name} does not tell its layout: it cannot be cached")
    return layout


def _dtype(name: str, pool: Any, kv_dtype: str) -> str:
    """What decides the meaning of the bytes of a pool. Raises ValueError if that is not known."""
    names = [dtype_name(getattr(pool, each)) for each in _DTYPES if hasattr(pool, each)]
    if not names:
        raise ConfigError(f"SGLang's pool {name} does not tell its dtype: it cannot be cached")
    # SGLang keeps floats of 8 bits and packed formats as bytes.
    if "uint8" in names:
        told = kv_dtype or _published_dtype()
        if not told:
            raise ConfigError(
                f"SGLang's pool {name} holds bytes and does not tell their dtype: set "
                '"kv_dtype" to the dtype of its KV cache, as "fp8_e4m3"'
            )
        names.append(told)
    return " ".join(names)


def _published_dtype() -> str:
    """``--kv-cache-dtype`` of this server, empty where it does not say all.

    On ROCm one name stands for two formats, which depend on the GPU.
    """
    if torch.version.hip:
        return ""
    from sglang.srt.runtime_context import get_model, get_spec

    try:
        drafts = get_spec().speculative_draft_kv_cache_dtype
        return f"{get_model().kv_cache_dtype} {drafts}"
    except (AttributeError, ValueError):  # not published: there is no server
        return ""


def _may_have_adapters() -> bool:
    """Whether this server has LoRA adapters, or may be given some while it runs."""
    from sglang.srt.runtime_context import get_context

    context = get_context()
    if not context.is_config_namespace_published("lora"):  # there is no server
        return False
    try:
        lora = context.config_bag("lora")
        return bool(lora.enable_lora or (lora.enable_lora is None and lora.lora_paths))
    except (AttributeError, ValueError):  # that is not known
        return True


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _by_page(good: Sequence[bool], parts: int, pages: int) -> list[bool]:
    return [all(good[page * parts : (page + 1) * parts]) for page in range(pages)]


def _leading(present: Sequence[bool]) -> int:
    return [*present, False].index(False)


def _restorable(transfer: PoolTransfer, present: Sequence[bool]) -> set[int]:
    """After how many pages a request can go on, as far as this pool decides it."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return {*range(1, _leading(present) + 1)}
    if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
        return set()
    window = max(1, len(transfer.keys or ()))
    ends = range(1, len(present) + 1)
    return {end for end in ends if all(present[max(0, end - window) : end])}
