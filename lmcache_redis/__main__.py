# SPDX-License-Identifier: Apache-2.0
from lmcache_redis.cli import main

main()
