# SPDX-License-Identifier: Apache-2.0
"""Bytes by name from asyncio: `python examples/store_asyncio.py [redis://HOST:PORT]`."""

import asyncio
import sys

from lmcache_redis import AsyncKVStore


async def main(url: str) -> None:
    # The last 64 MiB also stay in the memory of this process.
    async with AsyncKVStore(url, "examples", memory_bytes=64 << 20) as store:
        pages = {f"page-{n}": bytes([n]) * (1 << 20) for n in range(8)}
        stored = await asyncio.gather(*(store.put_bytes(*page) for page in pages.items()))
        if store.why_down:
            sys.exit(f"not stored: {store.why_down}")
        print(f"stored {sum(stored)} pages")

        loaded = await asyncio.gather(*map(store.get_bytes, pages))
        assert loaded == list(pages.values())
        print(f"loaded them again: {store.stats}")

        await asyncio.gather(*map(store.delete, pages))
        print(f"left: {await store.names()}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "redis://127.0.0.1:6379"))
