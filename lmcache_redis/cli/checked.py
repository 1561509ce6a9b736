# SPDX-License-Identifier: Apache-2.0
"""`--check`: what is set, where, and whether the files that it names can be used.

Makes nothing, and connects to nothing but, if asked, the server. A credential provider is made, and
asked only then.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmcache_redis.cli.gateway import GatewayConfig, check_gateway
from lmcache_redis.config import (
    AgentConfig,
    ClientConfig,
    TierSettings,
    endpoint_path,
    ensure_private,
    why_unsafe,
)
from lmcache_redis.errors import ConfigError
from lmcache_redis.processes import memory_limit_bytes
from lmcache_redis.settings import format_size, settings_of
from lmcache_redis.sources import given, misspelt_variables

KINDS = {"agent": AgentConfig, "gateway": GatewayConfig, "engine": ClientConfig}


def print_checked(of: type[TierSettings], options: Mapping[str, Any], as_json: bool) -> None:
    """Prints the settings that are not at their default, as lines of a file, and the warnings.

    Raises ``ConfigError`` if something has to change, and ``RedisError`` for the server.
    """
    found, known = given(of, options), settings_of(of)
    config = found.config(of)
    _check_files(config)
    if options["connect"] and config.redis_url:
        _connect(config, config.redis_url)
    warnings = [*misspelt_variables(AgentConfig, GatewayConfig), *_memory_warnings(config)]
    shown = {name: known[name].write(value) for name, value in found.values.items()}
    for name, text in shown.items():
        if known[name].secret or (name == "redis_url" and re.search("[@?]", text)):
            shown[name] = "(not shown)"
    if as_json:
        settings = [
            {"name": known[name].option[2:], "value": value, "from": found.places[name]}
            for name, value in shown.items()
        ]
        print(json.dumps({"settings": settings, "warnings": warnings}, indent=2))
        return
    for name, value in shown.items():
        print(f"{known[name].option[2:]} = {value}  # {found.places[name]}")
    print("# the settings can be used; all others have their default")
    for said in warnings:
        print(f"lmcache-redis: warning: {said}", file=sys.stderr)


def _connect(config: TierSettings, url: str) -> None:
    """As agents do: tools need more rights. Raises ``RedisError`` and ``ConfigError``."""
    from lmcache_redis.resp import RedisOptions
    from lmcache_redis.resp.finder import find_servers
    from lmcache_redis.resp.net.connection import Connector
    from lmcache_redis.resp.options import parse_deployment

    options = RedisOptions.of_settings(config, url)
    for server in find_servers(parse_deployment(options), options.connect_timeout_s):
        connector = Connector(server, options.connect_timeout_s, options.op_timeout_s)
        connector.open("lmcache-redis-check").close()


def _check_files(config: TierSettings) -> None:
    """Raises ``ConfigError`` for a file or a directory that cannot be used."""
    from lmcache_redis.resp import RedisOptions, check_url
    from lmcache_redis.seal import read_seal_keys

    read_seal_keys(config.seal_key_file)
    if config.redis_url:
        check_url(RedisOptions.of_settings(config, config.redis_url))
    if config.disk_path is not None:
        _check_disk(Path(config.disk_path))
    if isinstance(config, AgentConfig):
        directory = endpoint_path(config.endpoint).parent
        if os.path.lexists(directory):
            ensure_private(directory)
    if isinstance(config, GatewayConfig):
        check_gateway(config)


def _check_disk(directory: Path) -> None:
    # Path.exists raises where this user may not look into a parent.
    there = next(each for each in (directory, *directory.parents) if os.path.exists(each))
    unsafe = why_unsafe(there) if there == directory else None
    if unsafe is None and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        unsafe = f"{there} is no directory, or cannot be written to"
    if unsafe is not None:
        raise ConfigError(f"--disk-path {directory} cannot be used: {unsafe}, or choose another")


def _memory_warnings(config: TierSettings) -> Iterator[str]:
    limit = memory_limit_bytes()
    for name, each in settings_of(type(config)).items():
        if name in ("pool_bytes", "memory_bytes") and getattr(config, name) > limit:
            yield (
                f"{each.option} is {format_size(getattr(config, name))}, but this process may use "
                f"{limit / 2**30:.1f} GiB of memory"
            )
