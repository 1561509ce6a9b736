"""The command line: `lmcache-redis`, also `python -m lmcache_redis.cli`."""

from lmcache_redis.cli.app import main

__all__ = ["main"]
