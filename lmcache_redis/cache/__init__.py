"""A cache of chunks: host memory in front of tiers, files of this node and Redis.

A `ChunkForm` (`lmcache_redis.chunks`) says how the chunks of one worker are named and split into
stripes; a hash identifies one of them. In memory a chunk is an `Entry` of the host pool. A pinned
entry keeps its memory; an unpinned one stays until its memory is needed.

    pool              which chunk holds which memory, and who waits for it to be filled
    disk              a tier behind the pool (`lmcache_redis.tiers`), as is `RedisPlane`
    writebehind       one bounded queue per tier; the changes of one key are in order
    schedule          which writes begin: they give way to loads
    backing           a tier's counters and limits; tiers are told what the pool serves
    pacing            decisions: which parts a prefix needs, how much of it is worth loading
    lookup            how many leading chunks are available, pinned, by a deadline
    parts             the parts of a lookup's chunks: held, missing, and where those are
    cache             all of these together, and clears
    threads           the thread that owns all of this, its timers, and worker threads

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
    request = LookupRequest([form], hashes, deadline_s=time.monotonic() + 5.0)
    lookup = PrefixLookup(cache, request, done=lambda found: pins.append(found.take()))
    lookup.start()
    run(lambda: pins)
    (held,) = pins                                  # the cached prefix, by chunk and rank
    for entry in held.values():
        payload = b"".join(cache.views(form, entry))
        cache.pool.unpin(entry)

    plane.close(1.0)
"""

from lmcache_redis.cache.backing import DISK_COUNTERS, REDIS_COUNTERS, Backing
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.cache.pool import Arena, Entry, EntryState, HostPool
from lmcache_redis.cache.threads import Owner, OwnerLoop

__all__ = [
    "DISK_COUNTERS",
    "REDIS_COUNTERS",
    "Arena",
    "Backing",
    "Cache",
    "Entry",
    "EntryState",
    "HostPool",
    "LookupRequest",
    "Owner",
    "OwnerLoop",
    "PrefixLookup",
]
