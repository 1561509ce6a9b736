"""URLs, connections that speak RESP, and the map from keys to servers.

endpoint     the options of a plane, and its URL: a server, Sentinels, a cluster
connect      name look-up, TCP or unix socket, TLS, greeting
stream       bytes over a socket, with a deadline
wire         RESP: commands to bytes, bytes to replies
connection   requests and replies in order
topology     which server has which keys, and redirections
"""
