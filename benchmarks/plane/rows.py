# SPDX-License-Identifier: Apache-2.0
"""The results: one row of medians for each client, setting, operation and size."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.plane.messages import MIB, Measured, Setting
from benchmarks.plane.peers import OURS
from lmcache_redis.chunks.cutting import stripe_payload_bytes

MOVES = ("first-store", "overwrite", "steady", "load")
SCAN = "scan"
CACHED = ("none", "half", "all")


@dataclass(frozen=True, slots=True)
class Case:
    """What a sample measures. value_bytes: of a chunk, or of a key for scans.

    cached: how many of the keys a scan finds: `all`, `half` or `none`.
    """

    client: str
    setting: Setting
    op: str
    value_bytes: int
    items: int
    cached: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: medians over its rounds.

    client: `ours`, `lmcache`, `redis-py`, `valkey-glide` or `ceiling`. op: one of ``MOVES``,
    or `scan`. value_bytes: of a chunk, or of a key. items: chunks or keys at a time. checksum:
    whether one is computed by a store or verified by a load.
    gb_per_s: payload, 1e9 bytes. ms: of a scan. cpu_s_per_gb: user and system time of the
    client's process. how: the variant of a client that has several. default: our client with its
    default setting. stripe_bytes: payload of one Redis value. threads: of our client, which share
    the connections. sealed: whether our client encrypted the values.
    """

    client: str
    op: str
    value_bytes: int
    items: int
    connections: int
    checksum: bool
    gb_per_s: float | None
    ms: float | None
    cpu_s_per_gb: float | None
    rounds: int
    cached: str | None
    how: str | None
    default: bool
    stripe_bytes: int | None
    threads: int | None
    sealed: bool = False


class Samples:
    """Samples by case, in the order of the first sample of each."""

    def __init__(self) -> None:
        self._by_case: dict[Case, list[Measured]] = {}

    def add(self, case: Case, measured: Measured) -> None:
        self._by_case.setdefault(case, []).append(measured)

    def rows(self) -> list[Row]:
        return [_row(case, samples) for case, samples in self._by_case.items()]


def _row(case: Case, samples: list[Measured]) -> Row:
    setting, ours, moved = case.setting, case.client == OURS, case.op != SCAN
    elapsed_s = statistics.median(sample.elapsed_s for sample in samples)
    cpu_s = statistics.median(sample.cpu_s for sample in samples)
    gigabytes = case.value_bytes * case.items / 1e9
    stripe_bytes = case.value_bytes
    connections = setting.connections
    if ours:
        stripe_bytes = stripe_payload_bytes(case.value_bytes, setting.slot_bytes)
        connections = connections if moved else 1  # scans use the control connection
    return Row(
        client=case.client,
        op=case.op,
        value_bytes=case.value_bytes,
        items=case.items,
        connections=connections,
        checksum=ours and moved and setting.checksums,
        gb_per_s=round(gigabytes / elapsed_s, 3) if moved else None,
        ms=None if moved else round(elapsed_s * 1e3, 3),
        cpu_s_per_gb=round(cpu_s / gigabytes, 3) if moved else None,
        rounds=len(samples),
        cached=case.cached,
        how=setting.how or None,
        default=ours and setting == Setting(),
        stripe_bytes=stripe_bytes if moved else None,
        threads=setting.threads if ours and moved else None,
        sealed=setting.sealed,
    )


def size_text(nbytes: int) -> str:
    return f"{nbytes / MIB:g} MiB" if nbytes >= MIB else f"{nbytes / 1024:g} KiB"
