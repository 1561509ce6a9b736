"""Sealed values: XAES-256-GCM over the payload of each stripe (docs/internals/security.md).

The seal is the last 48 bytes of a stripe's header:

    464   8s  key id        472  24s  nonce        496  16s  tag

The nonce is drawn by the operating system for every encryption: also when a stripe is sent again.
Associated data are the header, with both checksums and the tag zero, and the whole Redis key. So a
value is good only where, and as what, it was stored. The payload's checksum is that of the
ciphertext: damage can be told without a key.
"""

from lmcache_redis.seal.keys import Opened, SealKeys, read_seal_keys

__all__ = ["Opened", "SealKeys", "read_seal_keys"]
