"""The `lm://` server: LMCache's TCP protocol on top of the tiers.

config      settings
tls         certificates
keytext     key texts and the keys of tiers
payloads    what a message says about a payload, and the metadata of tiers
slots       bounded memory that payloads are received into and sent from
stream      one socket: exact receives, sends without joins, stalls
connection  one client: its requests, one after the other
counting    counters, and log lines that cannot flood
server      accepting, limits, stopping
main        `lmcache-redis gateway`
"""
