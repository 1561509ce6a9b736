# SPDX-License-Identifier: Apache-2.0
"""Redis behind LMCache's multiprocess server: an L2 adapter of its ``plugin`` type.

    lmcache server --l2-adapter '{"type": "plugin",
        "module_path": "lmcache_redis.integrations.lmcache", "class_name": "RedisL2Adapter",
        "adapter_params": {"url": "redis://cache.example:6379"}}'

An object of LMCache is a chunk: its payload goes straight between LMCache's memory and sockets.
LMCache's keys name model, rank, group, salt and tokens. They say nothing of LoRA adapters, which no
adapter of LMCache can know, nor of weights, dtype or shape: weights are what ``weights_id`` says,
and dtype and shape are part of the namespace, so an object of another dtype is a miss before any of
it is loaded. Objects that a serde of LMCache has
encoded do not tell what they encode: they are refused.

Interface: LMCache 0.5.6, ``lmcache/v1/distributed/l2_adapters/base.py``. `get_memory_tags` and
`submit_touch` are of 0.5.7.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata, dtype_name, itemsize
from lmcache_redis.chunks.names import ChunkForm
from lmcache_redis.errors import FormatError
from lmcache_redis.regions import DoorSettings, RegionChunk, RegionStore, answered, form_of

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")

_KEPT_FORMS = 4096
_KEPT_CHARGES = 131_072
_CLOSE_S = 5.0
_ENCODED = (
    "LMCache's serde is on: its objects do not tell which dtype and shape they encode, so they "
    'are not stored. Remove "serde" from this --l2-adapter'
)
# Of an object: its shapes and the names of its dtypes.
_Layout = tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]


class _Place(NamedTuple):
    """Whose objects have one layout."""

    model_name: str
    kv_rank: int
    group: int


class RedisL2AdapterConfig(L2AdapterConfigBase):
    """``adapter_params``: see docs/guides/doors.md. Raises ConfigError (a ValueError)."""

    def __init__(self, settings: DoorSettings) -> None:
        self.settings = settings

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> RedisL2AdapterConfig:
        return cls(DoorSettings.of(d))

    @classmethod
    def help(cls) -> str:
        return f"adapter_params of lmcache_redis: {', '.join(DoorSettings.__struct_fields__)}"


class RedisL2Adapter(L2AdapterInterface):
    """See the module. LMCache calls it on threads of its own; no call waits but `delete`."""

    config_class_name = "RedisL2AdapterConfig"

    def __init__(self, config: RedisL2AdapterConfig, **_: Any) -> None:
        super().__init__(max_capacity_bytes=0)
        self._settings = config.settings
        self._store = RegionStore(config.settings)
        self._forms = lru_cache(_KEPT_FORMS)(self._form)
        self._numbers = itertools.count(1)
        self._stores: _Finished[list[_StoredObject]] = _Finished()
        self._lookups: _Finished[Bitmap] = _Finished()
        self._loads: _Finished[tuple[list[ObjectKey], list[int]]] = _Finished()
        # The last layout that a lookup or an object had: deletions come without one.
        self._layouts: dict[_Place, _Layout] = {}
        self._charges = _Charges()
        # Once for each sentence: a server may have thousands of such objects a minute.
        self._warn = lru_cache(_KEPT_FORMS)(partial(logger.warning, "objects are not cached: %s"))

    # The descriptors of completions

    def get_store_event_fd(self) -> int:
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.fileno()

    # Stores

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        number = next(self._numbers)
        chunks = self._chunks(keys, objects)
        sizes = [chunk.form.chunk_bytes for chunk in chunks]
        present: list[bool] = []

        def stored(good: list[bool]) -> None:
            rows = zip(keys, sizes, present, good, strict=False)
            self._stores.put(number, [_StoredObject(*row) for row in rows])

        self._store.store(chunks, stored, present.extend)
        return number

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """LMCache's listeners are told here, on its own thread."""
        results: dict[int, L2StoreResult] = {}
        for number, objects in self._stores.take_all().items():
            stored = [each for each in objects if each.is_good]
            sizes = [self._charges.add(each.key, each.size) for each in stored]
            if stored:
                self._notify_keys_stored([each.key for each in stored], sizes)
            written = sum(each.size for each in stored if not each.was_there)
            results[number] = L2StoreResult(0 < len(stored) == len(objects), written)
        return results

    # Lookups

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: Mapping[int, MemoryLayoutDesc]
    ) -> int:
        number = next(self._numbers)
        try:
            for place in {_place(key) for key in keys}:
                described = group_layout_descs.get(place.group)
                if described is not None and described.shapes:
                    self._learn(place, "", _layout(described.shapes, described.dtypes))
        except FormatError as error:
            self._warn(str(error))
        known = self._known(keys)

        def found(there: list[bool]) -> None:
            hits = [at for (at, _), is_there in zip(known, there, strict=True) if is_there]
            self._lookups.put(number, _bitmap(len(keys), hits))

        self._store.lookup([chunk for _, chunk in known], found)
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is locked: a load checks what it finds."""

    # Loads

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        number = next(self._numbers)

        def loaded(good: Sequence[bool]) -> None:
            self._loads.put(number, (keys, [at for at, is_good in enumerate(good) if is_good]))

        self._store.load(self._chunks(keys, objects), loaded)
        return number

    def query_load_result(self, task_id: int) -> Bitmap | None:
        ended = self._loads.take(task_id)
        if ended is None:
            return None
        keys, good = ended
        if good:
            self._notify_keys_accessed([keys[at] for at in good])
        return _bitmap(len(keys), good)

    # The rest

    def submit_touch(self, keys: list[ObjectKey]) -> None:
        """Counts as a use of objects that LMCache serves from its own memory."""
        self._store.keep([chunk for _, chunk in self._known(keys)])
        self._notify_keys_accessed(keys)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Removes objects, as LMCache's eviction and quotas want; waits as long as a lookup."""
        known = self._known(keys)
        removed = answered(partial(self._store.remove, [chunk for _, chunk in known]))
        gone = [keys[index] for (index, _), is_gone in zip(known, removed, strict=True) if is_gone]
        if gone:
            self._notify_keys_deleted(gone, [self._charges.take(key) for key in gone])

    def report_status(self) -> dict[str, Any]:
        why = self._store.why_down
        counted = {name: n for name, n in self._store.metrics.snapshot().items() if n}
        return {"is_healthy": self._store.is_up, "type": "lmcache_redis", "reason": why, **counted}

    def get_memory_tags(self) -> Any:
        """Of LMCache 0.5.7: storage that is not on this node."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        return MemoryTags(MemorySegment.STORAGE, MemoryResidency.REMOTE)

    def close(self) -> None:
        self._store.close(_CLOSE_S)
        for each in (self._stores, self._lookups, self._loads):
            each.close()

    # Names

    def _chunks(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[RegionChunk]:
        """Empty, and a line in the log, if one of the objects cannot be stored as it is."""
        chunks = []
        try:
            for key, each in zip(keys, objects, strict=True):
                meta = each.metadata
                layout = _layout(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype])
                place = _place(key)
                if _is_flat_bytes(layout) and self._layouts.get(place) not in (None, layout):
                    raise FormatError(_ENCODED)
                form = self._learn(place, key.cache_salt, layout)
                view = memoryview(each.byte_array).cast("B")
                if view.nbytes != form.chunk_bytes:
                    raise FormatError(
                        f"an object of {view.nbytes} bytes whose shapes need {form.chunk_bytes}"
                    )
                chunks.append(RegionChunk(form, key.chunk_hash, [view]))
        except FormatError as error:
            self._warn(str(error))
            return []
        return chunks

    def _learn(self, place: _Place, salt: str, layout: _Layout) -> ChunkForm:
        """Raises FormatError, and keeps nothing, for objects that cannot be encoded."""
        form = self._forms(place, salt, layout)
        self._layouts[place] = layout
        return form

    def _known(self, keys: Sequence[ObjectKey]) -> list[tuple[int, RegionChunk]]:
        """The index and the name of those whose shape is known, from a lookup or an object."""
        found = []
        for index, key in enumerate(keys):
            layout = self._layouts.get(_place(key))
            if layout is not None:
                form = self._forms(_place(key), key.cache_salt, layout)
                found.append((index, RegionChunk(form, key.chunk_hash)))
        return found

    def _form(self, place: _Place, salt: str, layout: _Layout) -> ChunkForm:
        identity = {
            "door": "lmcache",
            "weights": self._settings.weights_id,
            "group": str(place.group),
            "salt": salt,
        }
        sizes = [math.prod(shape) * itemsize(name) for shape, name in zip(*layout, strict=True)]
        metadata = RemoteMetadata(sum(sizes), *layout, MemoryFormat.UNDEFINED)
        return form_of(identity, place.model_name, place.kv_rank, metadata, self._settings)


class _StoredObject(NamedTuple):
    """What became of an object: whether it was there before, and whether it is now."""

    key: ObjectKey
    size: int
    was_there: bool
    is_good: bool


class _Finished(Generic[ValueT]):
    """Results of tasks, and the descriptor that becomes readable with each. Thread-safe."""

    def __init__(self) -> None:
        self._notifier: Any = create_event_notifier()
        self._lock = threading.Lock()
        self._results: dict[int, ValueT] = {}
        self._is_closed = False

    def fileno(self) -> int:
        return int(self._notifier.fileno())

    def put(self, number: int, result: ValueT) -> None:
        with self._lock:
            if not self._is_closed:
                self._results[number] = result
                self._notifier.notify()

    def take(self, number: int) -> ValueT | None:
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, ValueT]:
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._notifier.close()


class _Charges:
    """What LMCache's quotas were told of the objects that were stored last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[ObjectKey, int] = {}

    def add(self, key: ObjectKey, size: int) -> int:
        """What is to be told: what was charged before is charged once."""
        with self._lock:
            was_charged = self._sizes.pop(key, None) is not None
            if len(self._sizes) >= _KEPT_CHARGES:
                del self._sizes[next(iter(self._sizes))]
            self._sizes[key] = size
        return 0 if was_charged else size

    def take(self, key: ObjectKey) -> int:
        with self._lock:
            return self._sizes.pop(key, 0)


def _place(key: ObjectKey) -> _Place:
    return _Place(key.model_name, key.kv_rank, key.object_group_id)


def _layout(shapes: Sequence[Any], dtypes: Sequence[Any]) -> _Layout:
    return tuple(tuple(shape) for shape in shapes), tuple(map(dtype_name, dtypes))


def _bitmap(size: int, indices: Sequence[int]) -> Bitmap:
    bits = Bitmap(size)
    for index in indices:
        bits.set(index)
    return bits


def _is_flat_bytes(layout: _Layout) -> bool:
    shapes, names = layout
    return len(shapes) == 1 and len(shapes[0]) == 1 and names == ("uint8",)
