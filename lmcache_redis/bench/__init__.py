"""`lmcache-redis bench`: how fast this machine and a server move and find chunks.

values      the memory that chunks are stored from and loaded into, with a stamp on every page
client      the data plane, used as an agent uses it
run         rounds of writes, reads and lookups, and their medians

The benchmarks beside other clients, of a GPU and of a whole engine are in `benchmarks/` of the
repository, which imports `values` and `client` from here.
"""
