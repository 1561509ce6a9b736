# SPDX-License-Identifier: Apache-2.0
"""What the Dockerfile says, which compose file, chart and manifests must agree with."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()

# Of servers, by name. One place to raise them.
IMAGES = {
    "valkey": "valkey/valkey:8.1.4",
    "prometheus": "prom/prometheus:v3.5.0",
    "grafana": "grafana/grafana:12.2.0",
    "busybox": "busybox:1.37.0",
}


def _one(pattern: str) -> str:
    (found,) = set(re.findall(pattern, DOCKERFILE, re.MULTILINE))
    return str(found)


USER = int(_one(r"useradd --uid (\d+)"))
# The directory of the socket.
WHERE = _one(r"^VOLUME (\S+)$")
ENDPOINT = _one(r"^ENV LMCACHE_REDIS_ENDPOINT=(\S+)$")
