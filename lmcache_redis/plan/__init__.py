# SPDX-License-Identifier: Apache-2.0
"""What a cache of some size would have done with the requests of a trace. No server is asked.

records      the lines that an agent's `--record` writes
reading      a `Trace` from files: recordings, hash_ids, or vLLM's KV events
traces       `Trace`, requests as columns
example      a made trace whose locality is known
simulate     `Replay`: a trace, cut into chunks, against sizes of pool, disk and Redis
pacing       what of a prefix is worth loading, with the agent's own rule
figures      the rows: hit rates, times, bytes of the link, money
shown        the columns, and one HTML page with plots
"""
