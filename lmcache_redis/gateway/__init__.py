"""The `lm://` server: LMCache's TCP protocol on top of the tiers.

config      settings
tls         certificates
keytext     key texts and the keys of tiers
payloads    what a message says about a payload, and the metadata of tiers
slots       bounded memory for payloads on their way
movers      threads that move large payloads between sockets and buffers
stream      one socket: exact receives, sends without joins, stalls
tiers       what connections do with the tiers
shared      what connections have in common
storing     a PUT that was received, on its way into the tiers
connection  one client: its requests, one after the other
counting    counters, and log lines that cannot flood
server      accepting, limits, stopping
main        `lmcache-redis gateway`
"""
