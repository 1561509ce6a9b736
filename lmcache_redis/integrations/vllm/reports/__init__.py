# SPDX-License-Identifier: Apache-2.0
"""What the connector reports through vLLM. An error here ends a report, never the cache.

stats    spans, and what is counted in scheduler and workers; in vLLM's front end it becomes metrics
holdings which chunks are in which tier, and what routers have been told of them
events   vLLM's KV events for what is to be told
"""
