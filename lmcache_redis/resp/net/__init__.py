"""URLs, connections that speak RESP, and the map from keys to servers.

endpoint     the URL of a plane: a server, Sentinels, a cluster
credentials  where user and password come from, at each connect
wire         RESP: commands to bytes, bytes to replies
tls          contexts, and what their errors mean
stream       bytes over a socket, with a deadline; the greeting, and what its errors mean
connection   name look-up, connecting; requests and replies in order
topology     which server has which keys, and redirections
"""
