# SPDX-License-Identifier: Apache-2.0
"""What the commands need of the gateway: the one place where they meet LMCache's interfaces."""

from __future__ import annotations

from lmcache_redis.compat.gateway.config import GatewayConfig

__all__ = ["GatewayConfig", "check_gateway", "run_gateway"]


def check_gateway(config: GatewayConfig) -> None:
    """Raises ConfigError for files of TLS that cannot be used."""
    from lmcache_redis.compat.gateway.server import tls_context

    tls_context(config)


def run_gateway(config: GatewayConfig) -> int:
    """Serve until a signal; the exit status."""
    from lmcache_redis.compat.gateway import main

    return main.run_gateway(config)
