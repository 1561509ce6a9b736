# SPDX-License-Identifier: Apache-2.0
"""Tools for the operators of the Redis behind the cache: inspect, purge, doctor.

server      redis-py's clients of the servers that a URL names, and a sentence for each error
names       keys, layouts, sizes and ages as text
stripes     which chunks a server holds, by SCAN, and what their stripes are, by headers
forms       how large chunks are, plain and as they are stored, by a sample of each form
inspect     explains one key, or summarises the cache by model and layout
purge       selects chunks and removes them
facts       reads the settings and the state of a server
rules       judges facts: what to change, and why
rights      tries the commands that agents send, as agents do, and judges what is refused
node        reads the facts of this node, its agent, engines and GPUs, and judges them
doctor      rights, facts, measurements and rules together
report      every report as JSON and as text
"""
