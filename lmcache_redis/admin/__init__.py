"""Tools for the operators of the Redis behind the cache: inspect, purge, doctor.

server      connections to the servers that a URL names
names       keys, layouts, sizes and ages as text
stripes     the values of stripe keys, judged by their headers
survey      which chunks a server holds, by SCAN, and how large they are
inspect     one key explained, or all that is cached by model and layout
purge       chunks chosen and removed, at a bounded rate
facts       the settings and the state of a server
rules       what to change, from facts alone
doctor      facts, measurements and rules together
report      all of it, as JSON and as text
"""
