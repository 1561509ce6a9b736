# SPDX-License-Identifier: Apache-2.0
"""Each version of vLLM has what the table of needs says that it has, and nothing since earlier."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis.integrations.vllm.needs import ALL
from tests.matrix.test_versions import each_version, with_vllm

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(300)]


@each_version
def test_a_version_has_what_the_table_says(version: str) -> None:
    # Some versions log to standard output.
    printed, found = json.loads(with_vllm(version, "-m", "tests.matrix.present").splitlines()[-1])
    assert printed == version
    wrong = []
    for need in ALL:
        is_there = found[f"{need.owner}.{need.name}"]
        if need.is_expected(version) and not is_there:
            wrong.append(f"vLLM {version} has no {need} ({need.purpose}): {need.without}")
        elif is_there and not need.is_expected(version):
            wrong.append(f"vLLM {version} has {need} already: the table says since {need.since}")
    assert not wrong, "\n".join(wrong)
