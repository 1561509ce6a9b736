# SPDX-License-Identifier: Apache-2.0
"""Runs in an engine's process first (`tests.engines.PATCH_VARIABLE`): as many canaries as asked."""

from lmcache_redis.client import scheduler

scheduler.CANARY_SHARE = 1.0
