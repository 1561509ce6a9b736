# SPDX-License-Identifier: Apache-2.0
"""Notifications to the service manager that has started this process: systemd, with Type=notify.

One datagram each, on the socket that NOTIFY_SOCKET names; without it nothing is sent.
https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 1.0


class ServiceManager:
    """What the manager asks for and is told. Never raises: the service runs without it too.

    watchdog_s: the manager restarts a service that is silent for so long; None: it does not watch.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # "@" stands for the abstract namespace. Other addresses (vsock) are for virtual machines.
        self._address = address.replace("@", "\0", 1) if address[:1] in ("/", "@") else None
        watched, interval = environment.get("WATCHDOG_PID"), environment.get("WATCHDOG_USEC", "")
        is_watched = watched in (None, str(os.getpid())) and interval.isdecimal()
        self.watchdog_s = int(interval) / 1e6 if is_watched and int(interval) else None

    def ready(self, status: str) -> None:
        """The start, or a reload, has ended. status: one line, for `systemctl status`."""
        self._tell("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        # Type=notify-reload compares the time with that of its signal.
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, within_s: float) -> None:
        """The stop begins. It may take longer than the unit's TimeoutStopSec."""
        self._tell("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(within_s * 1e6)}")

    def alive(self) -> None:
        """Feeds the watchdog."""
        self._tell("WATCHDOG=1")

    def _tell(self, *lines: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(_SEND_TIMEOUT_S)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            logger.warning("the service manager was not told %s: %s", lines[0], error)
