# SPDX-License-Identifier: Apache-2.0
"""The `lm://` server: LMCache's TCP protocol on top of a cache.

One asyncio loop owns the cache (`lmcache_redis.objects.cache`), all connections and all decisions.

config      settings
wire        between messages of the protocol and the cache: keys and metadata
stream      one socket: receives, sends, TLS
connection  one client: its requests, one after the other, and what they do with the cache
server      who may connect, limits, figures, stopping
main        `lmcache-redis gateway`
"""
