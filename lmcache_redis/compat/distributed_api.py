"""lmcache.v1.distributed.api: the names and the memory layouts of chunks.

`ObjectKey` is the package's own. It is ordered, and its fields are checked: what the original
takes silently (an integer hash over 64 bits, a rank outside its world) raises FormatError, which
is a ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmcache_redis import keys
from lmcache_redis.errors import FormatError, check_int
from lmcache_redis.keys import IPCCacheEngineKey, ObjectKey
from lmcache_redis.protocol import MAX_SIZE

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
        for shape in self.shapes:
            for size in shape:
                check_int("a size in a shape", size, 0, MAX_SIZE)
        for dtype in self.dtypes:
            if not isinstance(dtype, torch.dtype):
                raise FormatError(f"a dtype is a torch.dtype, not {dtype!r:.80}")
        object.__setattr__(self, "shapes", [torch.Size(shape) for shape in self.shapes])
        object.__setattr__(self, "dtypes", [*self.dtypes])


def ipc_keys_to_object_keys(ipc_keys: list[IPCCacheEngineKey]) -> list[ObjectKey]:
    """The chunks that keys with a chunk hash name, in the order of the keys.

    A key with a worker id gives one ObjectKey; a key without gives one for each worker of its
    world. Raises FormatError for a key with token ids, which names no chunk until it is hashed.
    """
    return keys.ipc_keys_to_object_keys(ipc_keys)
