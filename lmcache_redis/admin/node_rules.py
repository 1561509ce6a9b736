"""Judges the facts of a node: its agent, its engines, its processes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lmcache_redis.admin.names import shown_bytes
from lmcache_redis.admin.node import NodeFacts, Process
from lmcache_redis.admin.rules import CRITICAL, HINT, OK, WARNING, Finding
from lmcache_redis.admin.survey import Cut
from lmcache_redis.chunks.frame import stripe_payload_bytes

OLDEST_VLLM = (0, 27)
_DOCKER_SHM_BYTES = 64 << 20
_FEW_FILES = 1024
_FULL = 0.05
_BADLY_FILLED = 0.7
_CLOCK_S = 5.0

_WHY_ONE_NAMESPACE = {
    "pid": "the agent opens the engine's memory as /proc/PID/fd, and must see the engine's end",
    "ipc": "shared memory and CUDA IPC do not cross the border of an IPC namespace",
    "time": "leases on blocks are times of CLOCK_MONOTONIC, which both have to read alike",
}


def judge_node(facts: NodeFacts) -> list[Finding]:
    """The findings of all rules, the most important first."""
    found = [
        finding
        for rules in (_agent, _engines, _processes, _sizes, _stored)
        for finding in rules(facts)
    ]
    return sorted(found, key=lambda finding: finding.severity)


def _agent(f: NodeFacts) -> Iterator[Finding]:
    redis = f.report["redis"]
    if redis["up"]:
        yield Finding(OK, "Redis", f"the agent uses {redis['server']}")
    else:
        seen = f"the agent cannot use {redis['server']}: {redis['reason']}"
        why = "only the host pool serves hits, and nothing is kept for other nodes"
        yield Finding(CRITICAL, "Redis", seen, why, ("see the findings of the server",))
    if f.report["version"] == f.version:
        yield Finding(OK, "versions", f"agent and package {f.version}")
    else:
        seen = f"the agent is {f.report['version']}, the package here {f.version}"
        why = "an agent keeps running what it was started from"
        yield Finding(WARNING, "versions", seen, why, ("restart the agent; engines go on",))
    if f.vllm_version is not None:
        numbers = tuple(map(int, re.findall(r"\d+", f.vllm_version)[:2]))
        seen = f.vllm_version
        if numbers < OLDEST_VLLM:
            why = "the connector needs what vLLM tells it since 0.27: this engine is not cached"
            yield Finding(CRITICAL, "vLLM", seen, why, ("update vLLM to 0.27 or later",))
        else:
            yield Finding(OK, "vLLM", seen)
    if f.clock_ahead_s is not None:
        ahead_s = f.clock_ahead_s
        seen = f"the server's is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}"
        if abs(ahead_s) < _CLOCK_S:
            yield Finding(OK, "clocks", seen)
        else:
            why = "`inspect` and `purge --stored-longer-than` tell ages wrong by as much"
            yield Finding(HINT, "clocks", seen, why, ("run an NTP client on both machines",))


def _engines(f: NodeFacts) -> Iterator[Finding]:
    engines = f.report["engines"]
    waiting = [engine for engine in engines if not engine["ready"]]
    if waiting:
        seen = f"{len(waiting)} of {len(engines)} registered workers are not ready"
        why = "an engine hits only when its scheduler and all its ranks are connected"
        change = "see the engines' logs for lines of lmcache_redis; all ranks of a node need the "
        change += "same endpoint"
        yield Finding(WARNING, "engines", seen, why, (change,))
    elif engines:
        yield Finding(OK, "engines", f"{len(engines)} workers are registered and ready")
    else:
        why = "engines connect when they start; one that runs and is not here is not cached"
        change = 'start vLLM with --kv-transfer-config \'{"kv_connector":"LMCacheRedisConnector",'
        change += '"kv_role":"kv_both"}\'; its log says why it does not register'
        yield Finding(HINT, "engines", "none is registered", why, (change,))


def _processes(f: NodeFacts) -> Iterator[Finding]:
    if f.shm_bytes <= _DOCKER_SHM_BYTES:
        why = "vLLM's processes talk through /dev/shm, and the KV cache of CPU engines is in it"
        change = "docker run --shm-size 16g, or an emptyDir with medium: Memory at /dev/shm"
        yield Finding(WARNING, "/dev/shm", shown_bytes(f.shm_bytes), why, (change,))
    elif f.shm_free_bytes < _FULL * f.shm_bytes:
        seen = f"{shown_bytes(f.shm_free_bytes)} of {shown_bytes(f.shm_bytes)} are free"
        why = "a process that touches a page for which there is no room is killed with SIGBUS"
        yield Finding(WARNING, "/dev/shm", seen, why, ("ls -l /dev/shm; rm what nothing uses",))
    else:
        yield Finding(OK, "/dev/shm", shown_bytes(f.shm_bytes))
    if f.agent is None:
        why = "it is in another PID namespace: its limits and namespaces are not checked"
        change = "run doctor beside the agent, in its container"
        yield Finding(HINT, "processes", "the agent's cannot be seen", why, (change,))
        return
    yield from _limits(f, f.agent)
    apart = False
    for engine in f.engines:
        for finding in _together(f.agent, engine):
            apart = True
            yield finding
    if f.engines and not apart:
        yield Finding(OK, "namespaces", "the engines share those of the agent")


def _limits(f: NodeFacts, agent: Process) -> Iterator[Finding]:
    pool_bytes = f.report["pool"]["slots"] * f.report["pool"]["slot_bytes"]
    if f.has_gpu and agent.locked_bytes is not None:
        seen = "no limit" if agent.locked_bytes < 0 else shown_bytes(agent.locked_bytes)
        if 0 <= agent.locked_bytes < pool_bytes:
            why = f"the host pool ({shown_bytes(pool_bytes)}) is locked for copies of the GPU"
            change = ("ulimit -l unlimited", "systemd: LimitMEMLOCK=infinity")
            yield Finding(WARNING, "locked memory", seen, why, change)
        else:
            yield Finding(OK, "locked memory", seen)
    if agent.open_files is not None:
        seen = "no limit" if agent.open_files < 0 else f"{agent.open_files:,}"
        if 0 <= agent.open_files < _FEW_FILES:
            why = "the agent opens a file for each tensor of an engine, and connections"
            change = ("ulimit -n 65536", "systemd: LimitNOFILE=65536")
            yield Finding(WARNING, "open files", seen, why, change)
        else:
            yield Finding(OK, "open files", seen)


def _together(agent: Process, engine: Process) -> Iterator[Finding]:
    for name, why in _WHY_ONE_NAMESPACE.items():
        ours, theirs = agent.namespaces.get(name), engine.namespaces.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            seen = f"engine process {engine.pid} is in another {name} namespace than the agent"
            change = f"containers: {name}: host, or the {name} namespace of one container for both"
            yield Finding(CRITICAL, "namespaces", seen, why, (change,))
    if agent.uid not in (0, engine.uid):
        seen = f"engine process {engine.pid} runs as user {engine.uid}, the agent as {agent.uid}"
        why = "only the same user, or root, can open the engine's memory"
        yield Finding(CRITICAL, "users", seen, why, ("run both as one user",))


def _sizes(f: NodeFacts) -> Iterator[Finding]:
    """Each engine's chunks beside its blocks and the slots; equal ones once."""
    wanted, slot_bytes = f.report["chunk_size_tokens"], f.report["pool"]["slot_bytes"]
    kinds = {
        (
            engine["model"],
            engine["chunk_tokens"],
            tuple(group["part_bytes"] for group in engine["groups"]),
        )
        for engine in f.report["engines"]
    }
    for model, chunk_tokens, parts in sorted(kinds):
        if chunk_tokens != wanted:
            seen = f"{chunk_tokens} tokens for {model}, --chunk-size-tokens is {wanted}"
            why = "chunks are whole blocks: an engine whose blocks do not divide the size gets more"
            change = f"--chunk-size-tokens {chunk_tokens}, or another --block-size of vLLM"
            yield Finding(HINT, "chunk size", seen, why, (change,))
        else:
            yield Finding(OK, "chunk size", f"{chunk_tokens} tokens for {model}")
        slots = sum(-(-part // stripe_payload_bytes(part, slot_bytes)) for part in parts)
        filled = sum(parts) / (slots * slot_bytes)
        if filled < _BADLY_FILLED:
            seen = f"chunks of {model} fill their slots to {100 * filled:.0f} %"
            why = "the rest of these slots of the host pool is not used"
            change = "another --slot-bytes or --chunk-size-tokens, the same for all agents"
            yield Finding(HINT, "slots", seen, why, (change,))


def _stored(f: NodeFacts) -> Iterator[Finding]:
    """What is in Redis beside what this agent would write."""
    slot_bytes = f.report["pool"]["slot_bytes"]
    cut = {
        model
        for model, header in f.stored
        if Cut.of(header).stripe_payload_bytes
        != stripe_payload_bytes(header.chunk_bytes, slot_bytes)
    }
    for model in sorted(cut):
        seen = f"Redis has chunks of {model} that were cut for another --slot-bytes"
        why = "agents of different --slot-bytes share nothing: each takes the other's for misses"
        change = f"give all agents of this Redis one --slot-bytes; here it is {slot_bytes}"
        yield Finding(WARNING, "slot size", seen, why, (change,))
    sizes: dict[str, set[int]] = {}
    for model, header in f.stored:
        sizes.setdefault(model, set()).add(header.chunk_bytes)
    for model, found in sorted(sizes.items()):
        if len(found) > 1:
            shown = ", ".join(shown_bytes(size) for size in sorted(found))
            seen = f"Redis has chunks of {model} of several sizes: {shown}"
            why = "agents of different --chunk-size-tokens share nothing; nor do engines of "
            why += "different dtypes or parallel sizes. Parts of several KV cache groups are normal"
            change = "lmcache-redis inspect; give all agents one --chunk-size-tokens"
            yield Finding(HINT, "chunk sizes", seen, why, (change,))
    if f.stored and not cut:
        yield Finding(OK, "slot size", "what is in Redis is cut as this agent cuts it")
