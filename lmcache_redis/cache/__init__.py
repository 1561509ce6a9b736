"""A cache of chunks: host memory in front of tiers, files of this node and Redis.

A chunk is bytes with a name: a `ChunkForm` (`lmcache_redis.naming`) says how the chunks of one
worker are named and split into stripes, and a hash identifies one of them. In memory a chunk is an
`Entry` of the host pool: slots of an `Arena`, one per stripe, or one block of a `HeapMemory`. A
pinned entry keeps its memory; an unpinned one stays until its memory is needed.

    memory, pool      `Arena` or `HeapMemory`, and `HostPool`: which chunk holds which memory, and
                      who waits for it to be filled: a chunk is loaded once
    tier              the contract of the tiers behind the pool: `disk`, and `RedisPlane`
    writebehind       one bounded queue per tier; the changes of one key are in order
    pacing            rates of tiers and engines: how much of a prefix is worth loading, which
                      lookup is next, and which writes begin: they give way to loads
    lookup            `PrefixLookup`: how many leading chunks are available, pinned, by a deadline
    parts             which parts of its chunks a prefix needs, if a model has groups of layers
    cache             `Cache`: all of these together, and clears
    objects           `ObjectCache`: put, get and remove chunks of any size with their metadata
    threads           the thread that owns all of this, its key locks, and worker threads

Every method is called on the owner's thread and returns at once; none waits for a tier. Any thread
of the caller may read and write the views of an entry that the caller has pinned. Misuse raises.
Failures of a disk or a server never raise: doubtful bytes are a miss, and are counted.

An example with its own loop (``url`` names a server; ``layout`` is 32 bytes that differ whenever
the meaning of the bytes differs)::

    woken = threading.Event()
    loop = OwnerLoop(woken.set)

    def run(until):
        while not until():
            woken.wait(loop.run_due())
            woken.clear()
            loop.run_posted()

    plane = RedisPlane(RedisOptions(url))
    plane.start()
    plane.wait_probed(5.0)                          # until then it counts as down
    redis = Backing(plane, REDIS_COUNTERS, write_limit_bytes=32 << 20)
    cache = Cache(loop, Arena(64 << 20, slot_bytes=1 << 20), [redis], Metrics())
    metadata = opaque_pages(3_000_000)              # of each chunk
    form = ChunkForm.of(ChunkNames(layout), "org/model", 0, metadata, slot_bytes=1 << 20)

    entry = cache.reserve(form, b"hash 1")          # None: every slot is pinned
    for view in cache.views(form, entry):
        view[:] = b"k" * len(view)                  # on any thread
    cache.publish(entry)                            # lookups find it now; or cache.abandon(entry)
    cache.write_behind(form, b"hash 1", entry)      # to every tier that lacks it
    run(lambda: not cache.backlog)

    cache.pool.clear()                              # as another process would find it
    pins = []
    hashes = [b"hash 1", b"hash 2"]                 # of a prompt's chunks, in order
    lookup = PrefixLookup(cache, [form], hashes, time.monotonic() + 5.0,
                          done=lambda found: pins.append(found.take()))
    lookup.start()
    run(lambda: pins)
    (held,) = pins                                  # the cached prefix, by chunk and rank
    for entry in held.values():
        payload = b"".join(cache.views(form, entry))
        cache.pool.unpin(entry)

Chunks of any size are put and fetched by `ObjectKey`; a put replaces a chunk::

    behind = Cache(loop, HeapMemory(), [redis], Metrics(), idle_limit=64 << 20)
    objects = ObjectCache(behind, ChunkNames(), stripe_bytes=1 << 20)
    key = ObjectKey(b"hash 3", "org/model", 0)
    metadata = RemoteMetadata(3_000_000, [(3_000_000,)], ["uint8"], MemoryFormat.UNDEFINED)

    filled = objects.reserve(metadata)              # None: no room
    filled.payload[:] = b"o" * metadata.length
    written = []
    objects.publish(key, filled, written.append)    # gets find it now
    run(lambda: written)                            # [True]: it is stored

    behind.pool.clear()
    got = objects.hold(key)                         # None: it is not in memory
    found, loaded = [], []
    objects.find(key, time.monotonic() + 5.0, found.append)
    run(lambda: found)                              # [None] for a chunk that no tier has
    objects.load(key, found[0], time.monotonic() + 5.0, loaded.append)
    run(lambda: loaded)
    content = bytes(loaded[0].payload)
    objects.release(loaded[0])

    objects.close(1.0)
    loop.run_posted()
"""

from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.memory import Arena, HeapMemory
from lmcache_redis.cache.objects import Found, Held, ObjectCache
from lmcache_redis.cache.pool import Entry, EntryState, HostPool
from lmcache_redis.cache.threads import Owner, OwnerLoop
from lmcache_redis.cache.tier import DISK_COUNTERS, REDIS_COUNTERS, Backing, Tier

__all__ = [
    "DISK_COUNTERS",
    "REDIS_COUNTERS",
    "Arena",
    "Backing",
    "Cache",
    "Entry",
    "EntryState",
    "Found",
    "HeapMemory",
    "Held",
    "HostPool",
    "ObjectCache",
    "Owner",
    "OwnerLoop",
    "PrefixLookup",
    "Tier",
]
