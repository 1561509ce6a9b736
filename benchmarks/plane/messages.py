# SPDX-License-Identifier: Apache-2.0
"""The requests to a `worker` and its answers (`testkit.child`).

One `Measured` answers each request. A worker whose client fails ends with a traceback on stderr.
"""

from __future__ import annotations

import msgspec

from lmcache_redis.config import (
    DEFAULT_CONNECTIONS,
    DEFAULT_NETWORK_THREADS,
    DEFAULT_SLOT_BYTES,
)

MIB = 1 << 20


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to run a client; without arguments, our client's defaults.

    connections: of our client for loads, and as many for stores; of a peer its connections or
    threads. slot_bytes, threads, checksums, sealed: of our client only; without checksums it does
    not verify what it loads, and sealed values are encrypted with a key of this run.
    how: the variant of a peer that has several.
    """

    connections: int = DEFAULT_CONNECTIONS
    threads: int = DEFAULT_NETWORK_THREADS
    slot_bytes: int = DEFAULT_SLOT_BYTES
    checksums: bool = True
    sealed: bool = False
    how: str = ""


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``items`` values of one size, moved together."""

    value_bytes: int
    items: int


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="store"):
    """Stores a batch under keys of this name. fresh: the keys do not exist yet."""

    setting: Setting
    batch: Batch
    name: str
    fresh: bool


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="load"):
    """Loads the batch that was stored under this name, and checks it."""

    setting: Setting
    batch: Batch
    name: str


class PrepareScan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prepare-scan"):
    """Creates keys and stores small values under the first `present` of them. Not timed."""

    setting: Setting
    keys: int
    present: int


class Scan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="scan"):
    """Finds how many of the keys exist, from the first on; the result must be `present`."""

    setting: Setting
    present: int


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="measured"):
    """elapsed_s: wall time of the work. cpu_s: user and system time of the whole process."""

    elapsed_s: float = 0.0
    cpu_s: float = 0.0


Request = Store | Load | PrepareScan | Scan
