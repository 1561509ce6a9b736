# SPDX-License-Identifier: Apache-2.0
"""`KVStore`: tensors and bytes by name in Redis or Valkey, for programs of your own.

    from lmcache_redis import KVStore

    with KVStore("redis://cache.example:6379", "llama-8b") as store:
        store.put("prompt-17", tensor)          # True: it is stored
        store.get("prompt-17")                  # an equal tensor, or None

What is stored is checked on the way back, so a get returns what was put or nothing. While the
server cannot be reached, or refuses them, calls end: a put is False, a get is None, and `why_down`
says why. `names` raises then: it never returns a part of the list. Wrong arguments raise
FormatError or ConfigError, tensors ConfigError where there is no torch, and everything raises
Closed after `close`.

A process that is forked may use the stores that it inherits: each opens connections, threads and a
memory of its own at the next call.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from lmcache_redis.chunks.keys import MAX_HASH_BYTES, ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.errors import Closed, FormatError
from lmcache_redis.objects import ChunkBackend, in_memory, in_redis
from lmcache_redis.objects.buffers import (
    Allocate,
    TensorAllocation,
    byte_view,
    require_torch,
)
from lmcache_redis.processes import name_in_kernel
from lmcache_redis.resp import RedisOptions

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer, Self

_T = TypeVar("_T")
_P = ParamSpec("_P")

_RANK = ObjectKey.ComputeKVRank(1, 0, 1, 0)
# Calls of an `AsyncKVStore` that are in progress at once; others wait.
_THREADS = 16


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts of a store since it was made.

    Attributes:
        hits: Gets that found something.
        misses: Gets that did not.
        stored: Puts.
        not_stored: Puts that were dropped, or failed.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    not_stored: int = 0


class KVStore:
    """Tensors and bytes by name, in Redis or Valkey. Thread-safe.

    Args:
        redis: A URL, also redis+sentinel:// and redis+cluster://, or options with one.
        namespace: Any text. Stores of one namespace share what is in it.
        memory_bytes: Also keep that much in the memory of this process, the last used first.
        device: Where tensors are placed, "cpu" or a CUDA device.
        compress: "lossless" keeps floating-point tensors in fewer bytes, bit for bit. Any store
            reads them. None: as the options say, or "off".
        deadline_s: Of each call, and of each step of an iteration.

    Raises:
        ConfigError: The URL names no server, or a number is impossible.
    """

    def __init__(
        self,
        redis: str | RedisOptions,
        namespace: str = "default",
        *,
        memory_bytes: int = 0,
        device: str = "cpu",
        compress: str | None = None,
        deadline_s: float = 5.0,
    ) -> None:
        self.namespace = namespace
        self._key_of("a")  # checks the namespace
        layout = hashlib.blake2b(namespace.encode(), digest_size=32, person=b"lmcr2.store").digest()
        storages = [in_redis(redis, deadline_s=deadline_s, layout=layout, compress=compress)]
        if memory_bytes:
            storages.insert(0, in_memory(memory_bytes))
        self._open = functools.partial(ChunkBackend, storages, device)
        self._opened: ChunkBackend | None = self._open()
        self._is_closed = False
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        _stores.add(self)

    @property
    def _backend(self) -> ChunkBackend:
        """Raises Closed."""
        with self._lock:
            if self._is_closed:
                raise Closed("the store is closed")
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _forked(self) -> None:
        """In a new process: what belongs to the parent is left to it. Another thread of it may have
        had the lock.
        """
        self._lock = threading.Lock()
        self._opened = None

    def put(self, name: str, tensor: torch.Tensor) -> bool:
        """Store a dense tensor of one to eight dimensions in place of what the name has."""
        return self._count_put(self._backend.put(self._key_of(name), tensor))

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor, in memory of its own, or None. Raises FormatError for what is no tensor."""
        require_torch()
        allocation = TensorAllocation()

        def allocate(metadata: RemoteMetadata) -> Sequence[memoryview] | None:
            if len(metadata.shapes) != 1:
                raise FormatError(f"{name!r} is no tensor: load it with get_bytes")
            return allocation(metadata)

        self._load(name, allocate)
        tensor = allocation.tensor
        return tensor if tensor is None else tensor.to(self._backend.dst_device)

    def put_bytes(self, name: str, data: Buffer) -> bool:
        """Store the bytes of a contiguous buffer: bytes, a NumPy array, an `mmap`."""
        view = byte_view(data, "what is put")
        metadata = RemoteMetadata(view.nbytes, [], [], MemoryFormat.BINARY_BUFFER)
        return self._count_put(self._backend.put_bytes(self._key_of(name), metadata, [view]))

    def get_bytes(self, name: str) -> bytearray | None:
        """The bytes, also those of a tensor, or None."""
        found = bytearray()

        def allocate(metadata: RemoteMetadata) -> list[memoryview]:
            nonlocal found
            found = bytearray(metadata.length)
            return [memoryview(found)]

        return None if self._load(name, allocate) is None else found

    def get_into(self, name: str, buffer: Buffer) -> int | None:
        """Load the bytes to the start of a writable buffer; how many they are, or None.

        Raises FormatError if they are more than fit. A miss leaves the buffer undefined.
        """
        view = byte_view(buffer, "what is loaded into")
        if view.readonly:
            raise FormatError("the buffer to load into is read-only: a bytearray is not")

        def allocate(metadata: RemoteMetadata) -> list[memoryview]:
            if metadata.length > view.nbytes:
                raise FormatError(
                    f"{name!r} has {metadata.length} bytes; the buffer has {view.nbytes}"
                )
            return [view[: metadata.length]]

        metadata = self._load(name, allocate)
        return None if metadata is None else metadata.length

    def exists(self, name: str) -> bool:
        """Whether a get would most likely find it. Loads nothing."""
        return self.exists_many([name])[0]

    def delete(self, name: str) -> bool:
        """Remove it. False: there was none, or the server does not answer."""
        return self._backend.remove(self._key_of(name))

    def put_many(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Store several, some of them at the same time; how many are stored."""
        if not isinstance(tensors, Mapping):
            raise FormatError(f"put_many takes tensors by name, not a {type(tensors).__name__}")
        pairs = [(self._key_of(name), tensor) for name, tensor in tensors.items()]
        stored = self._backend.batched_put(pairs)
        self._count("stored", stored)
        self._count("not_stored", len(pairs) - stored)
        return stored

    def get_many(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Each name in order with its tensor, or None, while the next ones are loaded."""
        require_torch()
        asked = _listed(names)
        loads = self._backend.batched_get(map(self._key_of, asked))
        for name, tensor in zip(asked, loads, strict=True):
            self._count("misses" if tensor is None else "hits")
            yield name, tensor

    def exists_many(self, names: Iterable[str]) -> list[bool]:
        """`exists` of each, all asked at once."""
        return self._backend.batched_contains(map(self._key_of, _listed(names)))

    def names(self) -> list[str]:
        """What this namespace has, in any order. Looks at all keys of the server.

        Raises `lmcache_redis.errors.NotListed` if that may not be all: the server is down, may not
        be asked, or has more than fit in memory.
        """
        return [key.chunk_hash.decode("utf-8", "replace") for key in self._backend.stored_keys()]

    @property
    def why_down(self) -> str:
        """Why calls fail: why the server is down, or what the last ones were answered.

        Empty if the last of each kind (get, put, question) worked, or none was tried and it is up.
        """
        return "" if self._opened is None else self._opened.why_down

    @property
    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(**self._counts)

    def close(self) -> None:
        """End all calls and connections. Idempotent."""
        with self._lock:
            self._is_closed = True
        if self._opened is not None:
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"KVStore(namespace={self.namespace!r}, {self.why_down or 'up'}, {self.stats})"

    def _key_of(self, name: str) -> ObjectKey:
        """Raises FormatError."""
        encoded = name.encode(errors="replace") if isinstance(name, str) else b""
        if not 1 <= len(encoded) <= MAX_HASH_BYTES or encoded.decode() != name:
            raise FormatError(
                f"a name is text of 1 to {MAX_HASH_BYTES} bytes of UTF-8, not {name!r:.80}: "
                "use a digest for longer ones"
            )
        return ObjectKey(encoded, self.namespace, _RANK)

    def _load(self, name: str, allocate: Allocate) -> RemoteMetadata | None:
        metadata = self._backend.get_bytes(self._key_of(name), allocate)
        self._count("misses" if metadata is None else "hits")
        return metadata

    def _count_put(self, is_stored: bool) -> bool:
        self._count("stored" if is_stored else "not_stored")
        return is_stored

    def _count(self, counter: str, count: int = 1) -> None:
        with self._lock:
            self._counts[counter] += count


def _listed(names: Iterable[str]) -> list[str]:
    """Raises FormatError for one name, whose letters are none."""
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise FormatError(f"names are a list of names, not {names!r:.80}")
    return list(names)


def _in_thread(
    call: Callable[Concatenate[KVStore, _P], _T],
) -> Callable[Concatenate[AsyncKVStore, _P], Coroutine[Any, Any, _T]]:
    """The call as a coroutine."""

    @functools.wraps(call)
    async def run(store: AsyncKVStore, /, *args: _P.args, **named: _P.kwargs) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            store._threads, functools.partial(call, store.sync, *args, **named)
        )

    return run


class AsyncKVStore:
    """A `KVStore` for asyncio: the same calls as coroutines.

    A call that is cancelled goes on in the background until its deadline.

        async with AsyncKVStore("redis://cache.example:6379", "llama-8b") as store:
            await store.put("prompt-17", tensor)
            async for name, tensor in store.get_many(names):
                ...

    Args:
        redis: As of a `KVStore`.
        namespace: As of a `KVStore`.
        named: The other arguments of a `KVStore`.
    """

    def __init__(self, redis: str | RedisOptions, namespace: str = "default", **named: Any) -> None:
        self.sync = KVStore(redis, namespace, **named)
        self._forked()
        _stores.add(self)

    def _forked(self) -> None:
        self._threads = ThreadPoolExecutor(
            _THREADS, "lmcr-kvstore", name_in_kernel, ("lmcr-kvstore",)
        )

    put = _in_thread(KVStore.put)
    get = _in_thread(KVStore.get)
    put_bytes = _in_thread(KVStore.put_bytes)
    get_bytes = _in_thread(KVStore.get_bytes)
    get_into = _in_thread(KVStore.get_into)
    exists = _in_thread(KVStore.exists)
    delete = _in_thread(KVStore.delete)
    put_many = _in_thread(KVStore.put_many)
    exists_many = _in_thread(KVStore.exists_many)
    names = _in_thread(KVStore.names)

    async def get_many(
        self, names: Iterable[str]
    ) -> AsyncIterator[tuple[str, torch.Tensor | None]]:
        loads = self.sync.get_many(names)
        next_pair = _in_thread(lambda _: next(loads, None))
        while (pair := await next_pair(self)) is not None:
            yield pair

    @property
    def why_down(self) -> str:
        return self.sync.why_down

    @property
    def stats(self) -> StoreStats:
        return self.sync.stats

    async def close(self) -> None:
        await _in_thread(KVStore.close)(self)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Async{self.sync!r}"


# A child process opens anew what it inherits: threads and connections stay with the parent.
_stores: weakref.WeakSet[KVStore | AsyncKVStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in _stores:
        store._forked()


os.register_at_fork(after_in_child=_after_fork)
