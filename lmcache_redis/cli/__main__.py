from lmcache_redis.cli.app import main

main()
