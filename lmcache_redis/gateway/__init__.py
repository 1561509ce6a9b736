"""The `lm://` server: LMCache's TCP protocol on top of the tiers.

config      settings
wire        between messages of the protocol and tiers: keys and metadata
slots       bounded memory for payloads in flight
shared      what connections share: counters, log lines, threads for calls to tiers
movers      transfers between sockets and buffers, and threads for the large ones
stream      one socket: receives, sends, TLS, stalls
tiers       what connections do with the tiers
connection  one client: its requests, one after the other
access      who may connect: the listening socket, allowed peers, TLS
server      accepting, limits, stopping
main        `lmcache-redis gateway`
"""
