# SPDX-License-Identifier: Apache-2.0
"""The Redis data plane. `RedisPlane` is its interface (docs/internals/data-plane.md).

plane       the calls; starts and closes everything below
control     the control connection of a server: questions about keys, as steps, and probes
node        the servers and their threads; asks several of them
routes      which server has which keys, and where a redirection leads
asking      a question about keys of several servers, and following: a stripe, where they moved
unlinking   the removal of a chunk
lanes       a thread with several connections, for stripes
transfers   a chunk in flight, and what follows from the end of each of its stripes
codecs      what a stripe is packed as, and what is found for it
health      whether a server is up and takes writes
jobs        work that is answered exactly once, at its deadline by the timekeeper; queues, threads
net         connection: sockets with deadlines, name look-up, requests and replies in order; wire:
            RESP; endpoint: addresses, credentials, what the errors of connecting mean; commands:
            what users need rights for; tls

Not on the way of a chunk:

options     the options of a plane, and what its URL names
maps        the servers behind Sentinels or of a cluster, looked up again and again
removals    what servers evict and expire, as they tell it to subscribers
bulk        what moves stripes between sockets and slots, and one such mover in Python
"""

from lmcache_redis.resp.options import RedisOptions, check_url
from lmcache_redis.resp.plane import RedisPlane

__all__ = ["RedisOptions", "RedisPlane", "check_url"]
