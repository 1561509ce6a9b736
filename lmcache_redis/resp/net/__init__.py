"""Connections that speak RESP.

wire         RESP: commands to bytes, bytes to replies
tls          contexts, and what their errors mean
stream       bytes over a socket, with a deadline; the greeting, and what its errors mean
connection   name look-up, connecting; requests and replies in order
"""
