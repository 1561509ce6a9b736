from lmcache_redis.cli import main

main()
