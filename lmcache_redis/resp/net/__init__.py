"""Connections that speak RESP.

wire         RESP: commands to bytes, bytes to replies
tls          contexts, and what their errors mean
endpoint     addresses, credentials, and what the errors of connecting mean
connection   sockets with deadlines; name look-up, connecting; requests and replies in order
"""
