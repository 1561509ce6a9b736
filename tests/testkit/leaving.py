# SPDX-License-Identifier: Apache-2.0
"""Starts a process that never ends, says its pid, and ends."""

from __future__ import annotations

import socket
import subprocess
import sys

if __name__ == "__main__":
    left = subprocess.Popen(["sleep", "300"])
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        channel.sendall(b"%d\n" % left.pid)
