"""The former name of `lmcache_redis.backends`: its public names can be imported from here too."""

from lmcache_redis.backends import *  # noqa: F403
from lmcache_redis.backends import __all__ as __all__
