"""What a cache of some size would have done with the requests of a trace. No server is asked.

records      the lines that an agent's `--record` writes
traces       `Trace`, requests as columns, and the files that it is read from
events       a trace from vLLM's KV events
example      a made trace whose locality is known
simulate     `Replay`: a trace, cut into chunks, against sizes of pool, disk and Redis, in one pass
pacing       what of a prefix is worth loading, with the agent's own rule
figures      the rows: hit rates, times, bytes of the link, money
page         one HTML page of them, and its plots
"""
