# SPDX-License-Identifier: Apache-2.0
"""lmcache.v1.distributed.api: the names and the memory layouts of chunks.

`ObjectKey` is the package's own. It is ordered, and its fields are checked: what the original
takes silently (an integer hash over 64 bits, a rank outside its world) raises FormatError, which
is a ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lmcache_redis.chunks.keys import ObjectKey, share_rank
from lmcache_redis.chunks.metadata import MAX_SIZE
from lmcache_redis.compat.custom_types import IPCCacheEngineKey
from lmcache_redis.errors import FormatError, checked_shape

__all__ = ["IPCCacheEngineKey", "MemoryLayoutDesc", "ObjectKey", "ipc_keys_to_object_keys"]


@dataclass(frozen=True)
class MemoryLayoutDesc:
    """The shape and the dtype of each tensor of an object.

    Any number of tensors and of dimensions. Raises FormatError for lists of different lengths, a
    size that is no integer or negative, and a dtype that is not torch's.
    """

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.dtypes):
            raise FormatError(
                f"{len(self.shapes)} shapes but {len(self.dtypes)} dtypes: give one for each tensor"
            )
        shapes = [torch.Size(checked_shape(shape, MAX_SIZE)) for shape in self.shapes]
        for dtype in self.dtypes:
            if not isinstance(dtype, torch.dtype):
                raise FormatError(f"a dtype is a torch.dtype, not {dtype!r:.80}")
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "dtypes", [*self.dtypes])


def ipc_keys_to_object_keys(ipc_keys: Iterable[IPCCacheEngineKey]) -> list[ObjectKey]:
    """The chunks that keys with a chunk hash name, in the order of the keys.

    A key with a worker id gives one ObjectKey; a key without gives one for each worker of its world
    (`share_rank`). Raises FormatError for what is no key, and for a key with token ids, which names
    no chunk until they are hashed (`hash_chunks`).
    """
    object_keys: list[ObjectKey] = []
    for key in ipc_keys:
        if not isinstance(key, IPCCacheEngineKey):
            raise FormatError(f"an IPCCacheEngineKey is converted, not {key!r:.80}")
        if key.chunk_hash is None:
            raise FormatError("a key with token_ids names no chunk until the tokens are hashed")
        for worker in range(key.world_size) if key.worker_id is None else (key.worker_id,):
            rank = share_rank(key.world_size, worker)
            object_keys.append(ObjectKey(key.chunk_hash, key.model_name, rank))
    return object_keys
