# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from demo.dashboard import find


@pytest.fixture(autouse=True)
def _prometheus_is_installed(request: pytest.FixtureRequest) -> None:
    needed = request.node.get_closest_marker("servers")
    if needed and (find("prometheus") is None or find("promtool") is None):
        pytest.skip("prometheus is not installed")
