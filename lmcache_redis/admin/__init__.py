"""Tools for the operators of the Redis behind the cache: look, remove, judge.

server      clients of the server that a URL names; the only place that makes one
names       keys, layouts, sizes and ages as people write and read them
stripes     what stands under a stripe's key, judged by its header
survey      which chunks a server holds, by SCAN, and how they are cut
inspect     one key explained, or all that is cached in a table
purge       chunks chosen and removed, at a bounded rate
facts       what can be seen of a server
rules       what to change, from facts alone
doctor      facts, what is measured, and rules together
report      all of it, as JSON for programs and as text for people
"""
