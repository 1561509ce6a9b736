"""What the connector reports through vLLM: statistics on its /metrics, and events for routers.

    hooks       by which vLLM asks
    families    what there is; a table in docs/metrics.md is made from it
    stats       counts in the scheduler and in workers; vLLM adds them up for its front end
    prometheus  there, the counts become metrics
    holdings    which chunks are in which tier, as far as the agent has told
    events      vLLM's KV events for what changes there

An error here turns off the report in question, never the cache (`guard.reporting`).
"""
