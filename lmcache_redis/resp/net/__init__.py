"""From a URL to connections that speak RESP, and to the server that has a key.

options      what a plane is configured with
endpoint     URLs: a server, Sentinels, a cluster
connect      name look-up, TCP or unix socket, TLS, greeting
stream       bytes over a socket, by a deadline
wire         RESP: commands to bytes, bytes to replies
connection   requests and replies in order
topology     which server has which keys, and redirections
"""
