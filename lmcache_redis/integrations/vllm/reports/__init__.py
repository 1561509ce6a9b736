"""What the connector reports through vLLM: statistics on its /metrics, and events for routers.

    hooks       by which vLLM asks
    stats       what is counted, in the scheduler and in workers; vLLM adds the counts up
    prometheus  in vLLM's front end, the counts become metrics
    events      which chunks are in which tier, and vLLM's KV events for what changes there

An error here turns off the report in question, never the cache (`guard.reporting`).
"""
