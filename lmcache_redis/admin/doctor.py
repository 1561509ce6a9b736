# SPDX-License-Identifier: Apache-2.0
"""Diagnoses the servers behind a cache: reads facts, measures, and applies the rules.

Measured is as an agent moves stripes: a few values of the usual size, under keys that name no
stripe. They are removed at the end, and expire. A full server evicts as much to make room.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmcache_redis.admin.facts import Facts, Need, gather, names_in_one_slot
from lmcache_redis.admin.forms import Sample, payload_of, samples_of, savings
from lmcache_redis.admin.node import NodeFacts, judge_node, look
from lmcache_redis.admin.rights import (
    Rights,
    judge_rights,
    probe_key,
    sent_by_agents,
    tools_refused,
    try_rights,
)
from lmcache_redis.admin.rules import Finding, Severity, judge
from lmcache_redis.admin.server import (
    CONNECT_TIMEOUT_S,
    OP_TIMEOUT_S,
    Primary,
    PrimaryServers,
    open_server,
)
from lmcache_redis.admin.sizes.sizing import EXPECTED_RATIO, SizeOptions, stored_part
from lmcache_redis.admin.stripes import SeenChunk, read_idle, survey
from lmcache_redis.chunks.frame import HEADER_BYTES
from lmcache_redis.chunks.metadata import MemoryFormat
from lmcache_redis.chunks.names import Reach
from lmcache_redis.config import DEFAULT_CONNECTIONS, DEFAULT_SLOT_BYTES
from lmcache_redis.errors import RedisError, RedisNotAllowed, RedisProtocolError, RedisUnavailable
from lmcache_redis.resp import RedisOptions
from lmcache_redis.resp.net.connection import Connection, Connector
from lmcache_redis.resp.net.wire import (
    CRLF,
    end_of_command,
    get_command,
    set_prefix,
    value_head,
)
from lmcache_redis.resp.options import parse_deployment

HERE = "this node"
_CLIENT_NAME = "lmcache-redis-doctor"
PINGS = 51
STRIPES = 8
VALUE_BYTES = HEADER_BYTES + DEFAULT_SLOT_BYTES
EXPIRES_S = 60
# Each direction is measured for this long.
_MEASURE_S = 0.6
_DEADLINE_S = 20.0
# Enough to find keys that belong to one of a thousand servers.
_ATTEMPTS = 50_000
_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings of all servers and of the node (None: no agent answered), the worst first.

    facts: none if the user may have only the rights of agents.
    """

    facts: tuple[Facts, ...]
    findings: tuple[Finding, ...]
    node: NodeFacts | None = None
    rights: tuple[Rights, ...] = ()
    fail_on: Severity = Severity.WARNING

    @property
    def exit_status(self) -> int:
        """1 if a finding is as serious as ``fail_on``, else 0."""
        return int(any(finding.severity <= self.fail_on for finding in self.findings))


def examine(
    options: RedisOptions,
    need: Need,
    *,
    bandwidth: bool,
    report: Mapping[str, Any] | None = None,
    ttl_refresh: bool = False,
) -> Diagnosis:
    """Tries the rights of agents, then diagnoses, for which a user may need more rights.

    report: the STATUS of this node's agent. ttl_refresh: what agents are set to, if none answers.
    Raises ConfigError; and RedisError if a server cannot be reached.
    """
    deployment, prefix = parse_deployment(options), options.key_prefix
    wanted = sent_by_agents(deployment, ttl_refresh, report)
    rights = try_rights(deployment, prefix, wanted, report)
    try:
        with open_server(options) as server:
            found = diagnose(server, prefix, need, bandwidth=bandwidth, report=report)
    except RedisNotAllowed:
        if not any(each.tried for each in rights):
            raise
        found = Diagnosis((), (tools_refused(deployment, rights),))
    findings = sorted((*judge_rights(rights), *found.findings), key=lambda each: each.severity)
    return replace(found, findings=tuple(findings), rights=rights)


def diagnose(
    server: PrimaryServers,
    prefix: bytes,
    need: Need,
    *,
    bandwidth: bool,
    report: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Examines, measures and judges every server, and this node. Changes no setting.

    report: the STATUS of this node's agent. Raises RedisError if a server cannot be reached.
    """
    need, stored, oldest_idle_s = sample(server, prefix, need, report or {})
    pool = None if report is None else report["pool"]
    models = {each.chunk.name.key.model_name for each in stored}
    models |= {each["model"] for each in (report or {}).get("engines", ())}
    in_one_slot = names_in_one_slot(prefix, models) if server.is_cluster else []
    facts = []
    for node in server.nodes:
        known = gather(
            server,
            node,
            prefix,
            need=need,
            pool_bytes=pool and pool["slots"] * pool["slot_bytes"],
            oldest_idle_s=oldest_idle_s,
        )
        # After the server's counters have been read: what is written may evict something.
        measured: dict[str, Any] = {"ping_s": measure_ping(node)}
        own = (each for each in in_one_slot if server.node_of(each) is node)
        measured["all_here"] = tuple(each.decode(errors="backslashreplace") for each in own)
        if bandwidth:
            measured["load_per_core"] = os.getloadavg()[0] / (os.cpu_count() or 1)
            try:
                read, write = measure_bandwidth(server, node, prefix)
                measured |= {"read_bytes_per_s": read, "write_bytes_per_s": write}
            except RedisError as error:
                measured["bandwidth_refused"] = str(error)
        facts.append(replace(known, **measured))
    here = None
    if report is not None:
        is_off = report["redis"].get("compress") == "off"  # an older agent does not say
        here = look(report, server, stored, savings(server, stored) if is_off else {})
    return Diagnosis(tuple(facts), findings_of(facts, here), here)


def findings_of(facts: Iterable[Facts], node: NodeFacts | None = None) -> tuple[Finding, ...]:
    """All findings, each with its server's address or `HERE`, the most important first. Pure."""
    found = [replace(finding, where=each.where) for each in facts for finding in judge(each)]
    if node is not None:
        found += [replace(finding, where=HERE) for finding in judge_node(node)]
    return tuple(sorted(found, key=lambda finding: finding.severity))


# ------------------------------------------------------------ what is stored


def sample(
    server: PrimaryServers, prefix: bytes, need: Need, report: Mapping[str, Any]
) -> tuple[Need, tuple[Sample, ...], float | None]:
    """The need by what is registered or stored, unless the user has named a size; a sample of each
    form; and the longest time without a use. Of a few chunks; nothing where that is
    refused.

    What engines have not stored, such as values of the library, is cut in its own way.
    """
    need = _as_registered(need, report)
    try:
        found = survey(server, prefix, everything=False)
        chunks = [each for each in found.chunks.values() if not each.name.is_description]
        idle = [each for each in read_idle(server, chunks) if isinstance(each, int)]
        samples = {
            form: each
            for form, each in samples_of(server, chunks).items()
            if each.header.metadata.fmt is MemoryFormat.PAGES
        }
    except RedisError:
        return need, (), None
    if not need.is_known and samples:
        pairs = [(each, samples[each.form]) for each in chunks if each.form in samples]
        need = _as_stored(need, pairs, report)
    return need, tuple(samples.values()), max(idle, default=None)


def _as_registered(need: Need, report: Mapping[str, Any]) -> Need:
    """The need of the engine of this node's agent that has the most KV a token, if there is one.

    A worker's layout names its rank. Ranks with equal bytes have one layout: they count once.
    """
    workers: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for each in report.get("engines", ()):
        workers[each["engine_id"]].append(each)
    if need.is_known or not workers:
        return need
    slot_bytes = report["pool"]["slot_bytes"]
    packs = report.get("redis", {}).get("compress") == "lossless"  # an older agent does not say
    found = (_need_of_engine(need, some, slot_bytes, packs) for some in workers.values())
    return max(found, key=lambda each: each.kv_bytes_per_token)


def _expected_ratio(group: Mapping[str, Any]) -> float:
    """As `size` expects it: states, and pages of several kinds of numbers, may stay as they are."""
    dtypes = group.get("dtypes", ())
    is_alike = len(dtypes) == 1 and group["reach"] != "state"
    return EXPECTED_RATIO.get(dtypes[0], 1.0) if is_alike else 1.0


def _need_of_engine(
    need: Need, workers: Sequence[Mapping[str, Any]], slot_bytes: int, packs: bool
) -> Need:
    first = workers[0]
    # Shares have one layout. An older agent names no rank.
    groups = {
        (group["layout"], group.get("kv_rank")): group
        for each in workers
        for group in each["groups"]
    }
    chunk_tokens = first["chunk_tokens"]
    chunks = max(1, need.prompt_tokens // chunk_tokens)
    steps = -(-need.prompt_tokens // SizeOptions().step_tokens)
    made = memory = loaded = 0
    for group in groups.values():
        ratio = _expected_ratio(group) if packs else 1.0
        part = stored_part(group["part_bytes"], slot_bytes, first["model"], ratio)
        reach = Reach(group["reach"], group["reach_tokens"])
        stored_chunks = min(chunks, steps) if reach.kind == "state" else chunks
        made += stored_chunks * part.part_bytes
        memory += stored_chunks * part.memory_bytes
        loaded += (chunks - reach.first_chunk(chunks, chunk_tokens)) * part.packed_bytes
    # Workers of other nodes are with other agents.
    per_token = first["world_size"] / len(workers) / (chunks * chunk_tokens)
    return replace(
        need,
        kv_bytes_per_token=max(1, round(made * per_token)),
        memory_per_token=memory * per_token,
        loaded_per_token=loaded * per_token,
        of=f"{first['model']}, as registered with the agent",
        is_known=True,
    )


def _as_stored(
    need: Need, chunks: Sequence[tuple[SeenChunk, Sample]], report: Mapping[str, Any]
) -> Need:
    """The need by the mean chunk of the model with the most chunks.

    Parts of one chunk have one hash: those of several groups and ranks are added up. report: of an
    agent, which knows how many tokens a chunk has; else it is the usual number.
    """
    hashes: defaultdict[str, set[bytes]] = defaultdict(set)
    for chunk, _ in chunks:
        hashes[chunk.name.key.model_name].add(chunk.name.key.chunk_hash)
    model = max(hashes, key=lambda name: len(hashes[name]))
    parts = [each for chunk, each in chunks if chunk.name.key.model_name == model]
    sizes = [
        stored_part(each.header.chunk_bytes, payload_of(each.header), model, 1 / each.share)
        for each in parts
    ]
    of_engine = [e["chunk_tokens"] for e in report.get("engines", ()) if e["model"] == model]
    chunk_tokens = [*of_engine, report.get("chunk_size_tokens", _CHUNK_TOKENS)][0]
    tokens = len(hashes[model]) * chunk_tokens
    return replace(
        need,
        kv_bytes_per_token=max(1, sum(size.part_bytes for size in sizes) // tokens),
        memory_per_token=sum(size.memory_bytes for size in sizes) / tokens,
        loaded_per_token=sum(size.packed_bytes for size in sizes) / tokens,
        of=f"{model}, as stored in chunks of {chunk_tokens} tokens",
        is_known=True,
    )


# --------------------------------------------------------------- what is measured


def measure_ping(node: Primary, pings: int = PINGS) -> float:
    """The median round trip in seconds. Raises RedisError."""
    times = []
    for _ in range(pings):
        started = time.perf_counter()
        node.ask_all([("PING",)])  # a refusal takes as long
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def probe_keys(prefix: bytes, is_there: Callable[[bytes], bool] = lambda key: True) -> list[bytes]:
    """Several keys as `probe_key` makes one.

    is_there: whether the measured node owns the key. Raises RedisUnavailable if it owns too few.
    """
    tried = (probe_key(prefix) for _ in range(_ATTEMPTS))
    keys = list(itertools.islice(filter(is_there, tried), STRIPES))
    if len(keys) < STRIPES:
        raise RedisUnavailable("no key that begins with the key prefix falls on this server")
    return keys


def _keys_on(server: PrimaryServers, node: Primary, prefix: bytes) -> list[bytes]:
    """As `probe_keys`, those of one server."""
    return probe_keys(prefix, lambda key: server.node_of(key) is node)


def measure_bandwidth(server: PrimaryServers, node: Primary, prefix: bytes) -> tuple[float, float]:
    """Bytes per second of reads and of writes, over an agent's connections. Raises RedisError."""
    keys = _keys_on(server, node, prefix)
    deadline = time.monotonic() + _DEADLINE_S
    connector = Connector(node.endpoint, CONNECT_TIMEOUT_S, OP_TIMEOUT_S)
    try:
        write_bytes_per_s = _write(connector, keys, deadline)
        read_bytes_per_s = _read(connector, keys, deadline)
    finally:
        node.ask_all([("UNLINK", key) for key in keys])
    return read_bytes_per_s, write_bytes_per_s


def _write(connector: Connector, keys: list[bytes], deadline: float) -> float:
    """Bytes per second, in rounds; each sends all stripes, then reads the replies."""
    # Not zeros: some networks compress.
    value, tail = secrets.token_bytes(VALUE_BYTES), end_of_command(EXPIRES_S)
    requests = [set_prefix(key, VALUE_BYTES, EXPIRES_S) + value + tail for key in keys]
    with contextlib.closing(connector.open(_CLIENT_NAME)) as connection:
        for rounds in itertools.count():
            connection.arm(deadline)
            connection.send(requests, len(keys))
            connection.arm(deadline)
            connection.receive(len(keys))
            if rounds == 0:  # not counted: the server allocates memory
                started = time.perf_counter()
            elif time.perf_counter() - started >= _MEASURE_S:
                break
        return rounds * len(keys) * VALUE_BYTES / (time.perf_counter() - started)


def _read(connector: Connector, keys: list[bytes], deadline: float) -> float:
    """Bytes per second, by one thread with one GET in flight on each of an agent's connections."""
    commands = itertools.cycle([get_command(key) for key in keys])
    room = bytearray(len(value_head(VALUE_BYTES)) + VALUE_BYTES + len(CRLF))
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(contextlib.closing(connector.open(_CLIENT_NAME)))
            for _ in range(DEFAULT_CONNECTIONS)
        ]
        started = time.perf_counter()
        for connection in connections:
            connection.arm(deadline)
            connection.send((next(commands),), 1)
        received_bytes = 0
        for connection in itertools.cycle(connections):
            _receive_value(connection, room, deadline)
            received_bytes += VALUE_BYTES
            took_s = time.perf_counter() - started
            if took_s >= _MEASURE_S:
                break
            connection.send((next(commands),), 1)
    return received_bytes / took_s


def _receive_value(connection: Connection, room: bytearray, deadline: float) -> None:
    """Receive the whole reply to a GET into a buffer of its size. Raises RedisError."""
    got = 0
    connection.arm(deadline)
    while got < len(room):
        got += connection.receive_some(memoryview(room)[got:])
    if not room.startswith(value_head(VALUE_BYTES)):
        raise RedisProtocolError("what was read is not what was written a moment ago")
