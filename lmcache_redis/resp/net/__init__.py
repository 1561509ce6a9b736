"""URLs, connections that speak RESP, and the map from keys to servers.

endpoint     the options of a plane, and its URL: a server, Sentinels, a cluster
wire         RESP: commands to bytes, bytes to replies
stream       bytes over a socket, with a deadline; the greeting, and what its errors mean
connection   name look-up, connecting; requests and replies in order
topology     which server has which keys, and redirections
"""
