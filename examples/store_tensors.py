# SPDX-License-Identifier: Apache-2.0
"""Tensors by name in Redis: `python examples/store_tensors.py [redis://HOST:PORT]`."""

import sys

import torch

from lmcache_redis import KVStore

url = sys.argv[1] if len(sys.argv) > 1 else "redis://127.0.0.1:6379"

with KVStore(url, "examples") as store:
    kv = {f"prompt-{n}": torch.rand(2, 4, 256, 64) for n in range(8)}
    stored = store.put_many(kv)
    if store.why_down:
        sys.exit(f"nothing was stored: {store.why_down}")
    print(f"stored {stored} tensors, {sum(each.nbytes for each in kv.values()) >> 10} KiB")

    for name, tensor in store.get_many(kv):
        assert tensor is not None
        assert torch.equal(tensor, kv[name])
    print(f"loaded them again: {store.stats}")

    for name in sorted(store.names()):
        store.delete(name)
    print(f"prompt-0 is {'there' if store.exists('prompt-0') else 'gone'}")
