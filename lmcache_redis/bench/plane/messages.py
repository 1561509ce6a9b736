"""What `process` asks a `worker` and what that answers: JSON, a line each, over a socket.

    request                 answer
    Prepare, PrepareScan    Measured, its times zero
    Store, Load, Scan       Measured

One answer follows each request; another request comes after it. A worker whose client fails
ends, its traceback on stderr: whoever asked finds the socket closed. It also ends when the
socket is closed at the other end.
"""

from __future__ import annotations

import msgspec

from lmcache_redis.resp.options import (
    DEFAULT_GET_CONNECTIONS,
    DEFAULT_NETWORK_THREADS,
    DEFAULT_SET_CONNECTIONS,
)

MIB = 1 << 20
# Header and payload together stay under 1 MiB, and slots are whole pages (docs/data-plane.md).
DEFAULT_SLOT_BYTES = MIB - 4096


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to run a client; without arguments, our client's defaults.

    get_connections, set_connections: for a peer, its connections or threads. slot_bytes,
    threads, checksums: of our client alone; without checksums it does not verify what it
    loads, and stores as ever. how: a peer's way of doing it, where it has several.
    """

    get_connections: int = DEFAULT_GET_CONNECTIONS
    set_connections: int = DEFAULT_SET_CONNECTIONS
    threads: int = DEFAULT_NETWORK_THREADS
    slot_bytes: int = DEFAULT_SLOT_BYTES
    checksums: bool = True
    how: str = ""


class Prepare(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prepare"):
    """Makes memory for values of one size, in place of the memory before."""

    value_bytes: int
    items: int


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="store"):
    """Stores all values under keys of this name. fresh: the keys do not exist yet."""

    setting: Setting
    name: str
    fresh: bool


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="load"):
    """Loads what was stored under this name, and checks that it came."""

    setting: Setting
    name: str


class PrepareScan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prepare-scan"):
    """Makes so many keys and puts small values under the first `present` of them."""

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


Request = Prepare | Store | Load | PrepareScan | Scan
