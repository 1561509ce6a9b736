# SPDX-License-Identifier: Apache-2.0
"""The name and the form of a chunk, as engines, agents and Redis see them. No I/O.

names      what a group of layers needs of a prefix, and what its chunks and stripes are called
keys       `ObjectKey`, and the hashes of chunks
frame      the header before the bytes of a stripe
cutting    into how large stripes chunks are cut
metadata   `RemoteMetadata`: length, shapes, dtypes and their codes
packing    payloads of floating-point numbers in fewer bytes
"""
