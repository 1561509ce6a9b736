# SPDX-License-Identifier: Apache-2.0
"""A cache of chunks: host memory in front of tiers, files of this node and Redis.

A `ChunkForm` (`lmcache_redis.chunks`) says how the chunks of one worker are named and split into
stripes; a hash identifies one of them. In memory a chunk is an `Entry` of the host pool. A pinned
entry keeps its memory; an unpinned one stays until its memory is needed.

    pool              which chunk holds which memory, and who waits for it to be filled
    arena             its memory, in slots
    disk              a tier behind the pool (`lmcache_redis.tiers`), as is `RedisPlane`
    sharing           a tier that engines of other tensor-parallel sizes use
    blocking          makes a tier of a store whose calls block, as those of disks do
    writebehind       one bounded queue per tier; the changes of one key are in order
    doubted           what a tier must not be believed to have; removals that are tried again
    schedule          which writes begin: they give way to loads
    pacing            decisions: which parts a prefix needs, how much of it is worth loading
    awaiting          how long a lookup waits for what another engine stores
    lookup            how many leading chunks are available, pinned, by a deadline
    parts             the parts of a lookup's chunks: held, missing, and where those are
    clearing          removes chunks whose keys have a common beginning
    cache             all of these together
    threads           the thread that owns all of this, its timers, and worker threads

Every method is called on the owner's thread and returns at once; none waits for a tier. Any thread
of the caller may read and write the views of an entry that the caller has pinned. Misuse raises.
Failures of a disk or a server never raise: doubtful bytes are a miss, and are counted.
"""
