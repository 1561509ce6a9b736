"""The gateway beside the server that LMCache brings for its `lm://` protocol, with one client.

servers     both, each in a process of its own
client      PUT, GET and EXIST over a socket, with nothing of the servers
load        many clients at once, in a process of its own
run         what is measured, and the rows
"""
