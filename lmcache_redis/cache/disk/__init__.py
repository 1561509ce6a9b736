# SPDX-License-Identifier: Apache-2.0
"""The disk tier: chunks as files in a local directory, found again after a restart.

format  the contents of a file, byte by byte, and its name
files   writes files whole or not at all, reads them into slots, and finds them after a restart
store   index and files, kept consistent; which files the byte limit evicts; blocking
tier    the store as a tier of the cache: threads, jobs, hang detection
"""
