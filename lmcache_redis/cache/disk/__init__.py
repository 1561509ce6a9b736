"""The disk tier: chunks in files of a directory of this node, found again after a restart.

format  what a file is, byte by byte, and its name
files   files written whole or not at all, and read into slots
scan    what a directory holds when it is opened
store   index and files kept in step, within a byte limit; blocking
tier    the same behind the contract of tiers: threads, jobs, a disk that hangs
"""
