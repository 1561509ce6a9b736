"""`gateway`: the tiers for clients that speak LMCache's `lm://` protocol."""

from __future__ import annotations

import logging
import sys

import typer

from lmcache_redis.cli.options import config_from, takes_options_of
from lmcache_redis.gateway.config import GatewayConfig


@takes_options_of(GatewayConfig)
def gateway(**options: object) -> None:
    """Serve chunks to LMCache clients over TCP (lm://), from memory, disk and Redis.

    Examples:

      lmcache-redis gateway --redis-url redis://cache.example:6379

      lmcache-redis gateway --listen lm://0.0.0.0:65432 --allowed-peers 10.0.0.0/8 --redis-url ...
    """
    config = config_from(GatewayConfig, options)
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    from lmcache_redis.gateway.main import run_gateway

    raise typer.Exit(run_gateway(config))
