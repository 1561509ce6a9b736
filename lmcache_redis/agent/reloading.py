"""SIGHUP: settings that change while the agent runs.

Only numbers that are compared when they are needed, and the level of the log. Everything else is
decided once: memory and threads are sized, engines were told (``chunk_size_tokens``,
``lookup_deadline_s``), connections are open. A changed value of such a setting is named in the log
and applies from the next start.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from lmcache_redis.agent.parts import Agent
from lmcache_redis.agent.service import Service
from lmcache_redis.config import AgentConfig, option_name
from lmcache_redis.errors import ConfigError

logger = logging.getLogger(__name__)

_Apply = Callable[[Agent, Service, AgentConfig], None]


def _log_level(agent: Agent, service: Service, config: AgentConfig) -> None:
    logging.getLogger().setLevel(config.log_level.upper())


def _write_queue(agent: Agent, service: Service, config: AgentConfig) -> None:
    for queue in agent.cache.queues:
        queue.limit_bytes = config.write_queue_limit_bytes


def _disk_size(agent: Agent, service: Service, config: AgentConfig) -> None:
    if agent.disk is not None:
        agent.disk.limit_bytes = config.disk_size


def _session_timeout(agent: Agent, service: Service, config: AgentConfig) -> None:
    agent.sessions.timeout_s = config.session_timeout_s


def _heartbeat_timeout(agent: Agent, service: Service, config: AgentConfig) -> None:
    service.heartbeat_timeout_s = config.heartbeat_timeout_s


def _shutdown_deadline(agent: Agent, service: Service, config: AgentConfig) -> None:
    service.shutdown_deadline_s = config.shutdown_deadline_s


RELOADABLE: Final[Mapping[str, _Apply]] = MappingProxyType(
    {
        "log_level": _log_level,
        "write_queue_bytes": _write_queue,
        "disk_size": _disk_size,
        "session_timeout_s": _session_timeout,
        "heartbeat_timeout_s": _heartbeat_timeout,
        "shutdown_deadline_s": _shutdown_deadline,
    }
)


class Reloading:
    """Reads the settings again and applies those that may change. Owned by the loop thread.

    read: the settings as they are now; raises ConfigError.
    """

    def __init__(self, agent: Agent, service: Service, read: Callable[[], AgentConfig]) -> None:
        self._agent = agent
        self._service = service
        self._read = read
        self._running = agent.config

    def reload(self) -> None:
        """All settings stay as they are if one of the new ones is wrong."""
        try:
            wanted = self._read()
            changed = [
                field
                for field in dataclasses.fields(AgentConfig)
                if getattr(wanted, field.name) != getattr(self._running, field.name)
            ]
            now = {f.name: getattr(wanted, f.name) for f in changed if f.name in RELOADABLE}
            config = dataclasses.replace(self._running, **now)
        except ConfigError as error:
            logger.error("not reloaded, every setting stays as it is: %s", error)
            return
        for name in now:
            before = getattr(self._running, name)
            RELOADABLE[name](self._agent, self._service, config)
            # A warning: shown at any level but error.
            logger.warning("reloaded %s: %s, was %s", option_name(name), now[name], before)
        later = [field.name for field in changed if field.name not in RELOADABLE]
        if later:
            logger.warning("changed, but only from the next start on: %s", ", ".join(later))
        if not changed:
            logger.info("reloaded: no setting has changed")
        self._running = config
