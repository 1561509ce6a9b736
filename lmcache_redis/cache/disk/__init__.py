"""The disk tier: chunks in files of a directory of this node, found again after a restart.

format  the content of a file, byte by byte, and its name
files   files written whole or not at all, and read into slots
scan    the files of a directory when it is opened
store   index and files, kept consistent, within a byte limit; blocking
tier    the store as a tier of the cache: threads, jobs, a disk that hangs
"""
