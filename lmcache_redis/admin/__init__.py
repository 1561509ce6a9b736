"""Tools for whoever runs the Redis behind the cache: look, remove, judge.

server      clients of the server that a URL names; the only place that makes one
names       keys as people write and read them, layouts, ages
stripes     what stands under a stripe's key, judged by its header
survey      which chunks a server holds, by SCAN
cuts        how chunks are cut: sizes, and what is missing
inspect     one key explained, or all that is cached in a table
purge       chunks chosen and removed, at a bounded rate
facts       what can be seen of a server
bandwidth   round trips and bytes a second, measured the way an agent moves them
findings    what was seen, what is said about it
rules       what to change, from facts alone: rules_memory, rules_way
doctor      facts, measurements and rules together
report      all of it for programs; text, sizes: for people
"""
