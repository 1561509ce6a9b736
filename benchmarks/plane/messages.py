"""What `process` asks a `worker` and what that answers: JSON, a line each, over a socket.

One `Measured` answers each request; the next request follows it. A worker whose client fails
ends, its traceback on stderr: the caller finds the socket closed. It also ends when the socket is
closed at the other end.
"""

from __future__ import annotations

import msgspec

from lmcache_redis.config import DEFAULT_SLOT_BYTES
from lmcache_redis.resp.options import (
    DEFAULT_GET_CONNECTIONS,
    DEFAULT_NETWORK_THREADS,
    DEFAULT_SET_CONNECTIONS,
)

MIB = 1 << 20


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to run a client; without arguments, our client's defaults.

    get_connections, set_connections: for a peer, its connections or threads. slot_bytes,
    threads, checksums: of our client alone; without checksums it does not verify what it
    loads; its stores are the same. how: a peer's way of doing it, where it has several.
    """

    get_connections: int = DEFAULT_GET_CONNECTIONS
    set_connections: int = DEFAULT_SET_CONNECTIONS
    threads: int = DEFAULT_NETWORK_THREADS
    slot_bytes: int = DEFAULT_SLOT_BYTES
    checksums: bool = True
    how: str = ""


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``items`` values of one size, which are moved together."""

    value_bytes: int
    items: int


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="store"):
    """Stores a batch under keys of this name. fresh: the keys do not exist yet."""

    setting: Setting
    batch: Batch
    name: str
    fresh: bool


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="load"):
    """Loads the batch that was stored under this name, and checks that it came."""

    setting: Setting
    batch: Batch
    name: str


class PrepareScan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prepare-scan"):
    """Makes keys and puts small values under the first `present` of them. Takes no time."""

    setting: Setting
    keys: int
    present: int


class Scan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="scan"):
    """Finds how many of the keys, from the first on, exist; `present` must come out."""

    setting: Setting
    present: int


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="measured"):
    """elapsed_s: wall time of the work. cpu_s: user and system time of the whole process."""

    elapsed_s: float = 0.0
    cpu_s: float = 0.0


Request = Store | Load | PrepareScan | Scan
