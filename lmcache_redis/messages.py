# SPDX-License-Identifier: Apache-2.0
"""The wire protocol between engines and the agent: message types and their specification.

Transport
---------
ZeroMQ DEALER (engine side) to ROUTER (agent). A message has two frames: a preamble (``PREAMBLE``:
magic and protocol version, compared before anything is decoded) and one msgpack-encoded tagged
Struct of this module. KV bytes are not sent: they move through memory that both sides map.

An engine may send up to ``MAX_BATCH`` questions as one message, each in a frame of its own after
one preamble. They are taken in this order and answered one by one.

Order of events
---------------
1. ``HELLO`` opens a connection. It names the engine, the role and, for a worker, its rank.
   ``WELCOME`` answers with the agent's identity (``agent_id`` is new in every process), its process
   and its chunk size. Any other message from an unknown peer is answered by
   ``FAILURE(UNKNOWN_PEER)``, which tells a client that the agent was restarted. ``PING``,
   ``STATUS``, ``WHY``, ``LAYOUTS``, ``GET_CHUNK_SIZE`` and ``TRUST``, which tools send, need no
   ``HELLO``.
2. A worker sends ``REGISTER_KV_CACHE``: the layout of each group of its layers, the layout's
   fingerprint, and handles to its memory. A chunk has one part for each group. The agent maps the
   memory before it answers ``DONE``. Until then, the worker's stores and retrieves fail, and
   lookups of its engine find nothing. If a registration is expected soon, they wait for it before,
   for two seconds after it has begun, and no longer than the engine would compute. Memory on a GPU
   comes with a page of signals: the engine's GPU writes a ticket to it when its queued work has
   come to the place that the ticket stands for (`device.signals`).
3. The scheduler sends ``LOOKUP``. A prefix counts as cached if every group has the parts that the
   engine needs after it (`Reach`); only these are loaded. The agent answers ``LOOKUP_RESULT`` when
   all of them are pinned in its host pool, when computing the rest is faster than loading it, or
   at ``lookup_deadline_s``. The pins belong to ``(engine_id, request_id)`` until each rank has
   retrieved its part, ``RELEASE_LOCKS`` names the chunk, ``END_SESSION`` ends the request, or the
   session times out.
4. A worker sends ``RETRIEVE`` for each group: parts of pinned chunks are copied into the named
   blocks. Parts that are not in the host pool are loaded first, until ``lookup_deadline_s`` or the
   end of the lease. On a GPU, the copy begins when the ticket ``after`` is on the page.
   ``RETRIEVE_RESULT`` lists the chunks that were not copied (indices into ``hashes``).
5. A worker sends ``STORE`` for each group: blocks are copied into slots, on a GPU when the ticket
   ``after`` is on the page. ``STORE_RESULT`` says that the blocks are no longer read. The agent
   writes the parts to Redis in the background.

Unnamed engines
---------------
The scheduler and the workers of an engine without a given id may have different ones, because each
of their processes makes one up. They are matched by id where the ids are equal. The ranks that are
then missing are those of all unnamed workers with the same model name and world size, if those of
each rank have equal layouts: their chunks have equal names, so one registration stands for all. If
layouts differ, lookups are misses. The transfers of such a worker belong to the session of the same
``request_id`` of such a scheduler.

Several clients of one engine and rank
--------------------------------------
Ranks of tensor parallelism that hold equal bytes may register as one rank, and two engines may have
one name. All of them are served, by the same rule: their layouts have to be equal.

Canaries
--------
One request in ``canary_every`` (``WELCOME``) that hits without local tokens loads nothing. When the
engine has computed the chunks of the hit, its workers send ``COMPARE`` in the place of ``STORE``:
the agent compares the blocks with the parts that the lookup has pinned, by their distance. If they
differ, it removes the parts from its tiers and, unless clients may have named them, distrusts their
layout and epoch: until it trusts them again, ``LOOKUP_RESULT`` says ``compare_only``, so that the
engine loads nothing and each hit is a canary, and each ``RETRIEVE`` fails. The agent trusts them
again after a hundred canaries without a difference, or when a tool sends ``TRUST``. What has
another epoch is another name.

Engines of several nodes
------------------------
Every worker talks to the agent of its node, and the scheduler to the agent of its own. All these
agents share one Redis. The engine tells its scheduler which workers are registered with which
agent (``agent_id`` of their ``WELCOME``). ``LOOKUP`` names the parts of the workers that are
registered with other agents. The agent asks Redis whether these parts exist, and neither loads nor
pins them. The agent of such a worker learns of the request with its ``RETRIEVE``, and loads the
parts before it copies them. A part that does not arrive is a failed chunk of that ``RETRIEVE``.

Leases
------
``STORE``, ``COMPARE`` and ``RETRIEVE`` carry ``lease_ns``, a time on ``CLOCK_MONOTONIC``, which
engine and agent share because they run on one machine. The agent starts no copy after the lease,
and checks it before each part of a copy (1 MiB on the CPU). A lease includes the wait for the
ticket: the agent enqueues no copy on a GPU before it has seen the ticket, because enqueued work
cannot be taken back.

- A store or a comparison reads. The engine keeps its blocks until the answer arrives or the lease
  expires. The agent discards what it reads after the lease. So a slow or stopped agent cannot cache
  the bytes of reused blocks.
- A retrieve writes. The engine keeps its blocks until the answer arrives, the agent's process has
  ended, or the agent has answered a later ``REGISTER_KV_CACHE`` of that worker with ``DONE``. The
  agent sends that answer only after the copies through the former mapping have ended
  (``UNREGISTER_KV_CACHE`` likewise). So an agent that resumes in the middle of a copy writes into
  blocks that no other request has.

Failures
--------
- The preamble differs: ``FAILURE(VERSION_MISMATCH)`` with a reason; the client stops sending.
- A message cannot be decoded or exceeds a bound: ``FAILURE(BAD_MESSAGE)``; it has no effect. A
  frame of more than ``MAX_MESSAGE_BYTES`` is not received: the connection is closed.
- A load has failed and the engine has not yet taken its blocks: ``HOLD_STORES``, because another
  worker that does not know of it may store what it computes with them.
- The agent has ``MAX_PEERS`` peers, or too few file descriptors: ``FAILURE(REFUSED)`` answers the
  ``HELLO`` of another peer.
- The agent stops: it answers lookups without hits and stores with all chunks dropped, ends what is
  in flight, and answers no ``HELLO``. Then its socket closes.
- The agent dies: its socket closes. The client fails every pending call, sends ``HELLO`` until an
  agent answers, and registers again.
- An engine dies, or an agent that listens hears nothing from it for ten seconds: the agent unpins
  the chunks of its sessions, unmaps its memory and forgets it. An engine that goes on learns that
  from the next answer, and sends ``HELLO`` again.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated

import msgspec

from lmcache_redis.chunks.keys import MAX_HASH_BYTES
from lmcache_redis.chunks.names import Reach
from lmcache_redis.device.handles import SharedMemoryHandle
from lmcache_redis.device.handles import StorageHandle as StorageHandle  # a field type below
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.tenants import MOST_LETTERS
from lmcache_redis.tier_kinds import KINDS

PROTOCOL_VERSION = 9
MAGIC = b"LMCR-MP"
PREAMBLE = MAGIC + PROTOCOL_VERSION.to_bytes(2, "big")
MAX_MESSAGE_BYTES = 16 << 20
MAX_BATCH = 64
MAX_PEERS = 512

EPOCH_BYTES = 8
Epoch = Annotated[bytes, msgspec.Meta(max_length=EPOCH_BYTES)]
# The bytes of a chunk hash after the epoch: a block hash, or an adapter digest and a block hash.
HASH_BYTES_OF_AN_EPOCH = (32, 48)
MAX_REMOTE_PARTS = 1 << 13
TokenSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e3)]
ChunkHash = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_HASH_BYTES)]
# The names of an ordered list of chunks, all of one length; the rest of their keys is known from
# HELLO and from the registered layouts.
Hashes = tuple[ChunkHash, ...]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
# Of the signal after which blocks may be read, or written: the engine may still be zeroing them.
Ticket = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Fingerprint = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
# Text that the agent keeps for a peer is bounded.
Name = Annotated[str, msgspec.Meta(max_length=1024)]
# The tenant of a request (`tenants`); empty: none.
Tenant = Annotated[str, msgspec.Meta(max_length=MOST_LETTERS)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages. An answer has the ``call_id`` of its question."""

    call_id: int


# Questions (engine to agent)


class Hello(Message, frozen=True, tag="HELLO"):
    """Opens a connection. ``worker_id`` is None for the scheduler and for tools.

    ``unnamed``: ``engine_id`` was made up, and others of the engine may have made up another one.
    ``client_id``: of this client, also when it connects again. A new connection replaces that of
    the same client, engine and role, and no other.
    """

    engine_id: Name
    model_name: Name
    world_size: int
    worker_id: int | None
    package_version: Name
    unnamed: bool = False
    client_id: Name = ""


class GetChunkSize(Message, frozen=True, tag="GET_CHUNK_SIZE"):
    """Asks for the chunk size in tokens."""


class KVGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of a worker's layers: which rank names its parts, and their layout."""

    kv_rank: int
    layout: KVLayout
    fingerprint: bytes


class RegisterKVCache(Message, frozen=True, tag="REGISTER_KV_CACHE"):
    """A worker's paged KV cache: its groups, by number, and the handles to its memory.

    ``signals``: the page of a worker on a GPU (`device.signals`); None on the CPU.
    """

    groups: tuple[KVGroup, ...]
    storages: tuple[StorageHandle, ...]
    signals: SharedMemoryHandle | None = None


class UnregisterKVCache(Message, frozen=True, tag="UNREGISTER_KV_CACHE"):
    """The worker is about to release its memory."""


class RemoteParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one group of a worker names its parts."""

    worker_id: int
    kv_rank: int
    fingerprint: Fingerprint
    reach: Reach


AllRemoteParts = Annotated[tuple[RemoteParts, ...], msgspec.Meta(max_length=MAX_REMOTE_PARTS)]


class Lookup(Message, frozen=True, tag="LOOKUP"):
    """Asks how many leading chunks are cached, and loads what a hit needs into the host pool.

    ``first_chunk``: how many chunks the engine has before them. ``before``: these, if ``WELCOME``
    has a ``store_after`` above 1. ``remote``: the parts of workers
    that are registered with other agents, which must be in Redis. ``token_s``: seconds in which the
    engine computes a prompt token; chunks that are slower to load are left out, and none for 0.
    ``busy_s``: seconds in which it computes the rest of the prompts that it has begun. ``begun``:
    requests with lookups that it has begun since its last ``LOOKUP``. Those that were answered and
    have neither begun nor ended count as prompts to be computed before this one. ``stored_chunks``:
    how many of ``hashes``, from the first on, another engine is said to have stored just now. Those
    that are not there yet are waited for, no longer than the engine would compute them.
    """

    request_id: Name
    hashes: Hashes
    first_chunk: Number = 0
    remote: AllRemoteParts = ()
    token_s: TokenSeconds = 0.0
    busy_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0
    begun: tuple[Name, ...] = ()
    before: Hashes = ()
    tenant: Tenant = ""
    stored_chunks: Number = 0


class Watch(Message, frozen=True, tag="WATCH"):
    """Asks what becomes of the chunks of ``parts`` in the tiers, for events to routers.

    The question stays open until there are ``CHANGES``. The next one with the same parts continues
    without a gap, and one with others begins anew.
    """

    parts: AllRemoteParts


class Store(Message, frozen=True, tag="STORE"):
    """Copies blocks of ``group`` into the cache: the blocks of each chunk's part, in order."""

    request_id: Name
    hashes: Hashes
    block_ids: tuple[int, ...]
    lease_ns: int
    after: Ticket | None = None
    group: Number = 0
    tenant: Tenant = ""


class Compare(Store, frozen=True, tag="COMPARE"):
    """Compares blocks with what a lookup has pinned. All chunks are answered ``already_cached``.

    client_named: how many hashes, at the end, cover names that clients may have given (of media).
    If these differ, the layout stays trusted.
    """

    client_named: Number = 0


class Retrieve(Message, frozen=True, tag="RETRIEVE"):
    """Copies parts of chunks into blocks of ``group``, without those of the first tokens."""

    request_id: Name
    hashes: Hashes
    block_ids: tuple[int, ...]
    skip_first_n_tokens: Number
    lease_ns: int
    after: Ticket | None = None
    group: Number = 0
    tenant: Tenant = ""


class HoldStores(Message, frozen=True, tag="HOLD_STORES"):
    """``held``: the workers of the caller's engine may compute with blocks that were not loaded.

    Until it says otherwise, or leaves, the stores of all of them are refused.
    """

    held: bool


class ReleaseLocks(Message, frozen=True, tag="RELEASE_LOCKS"):
    """Unpins chunks that a lookup of ``request_id`` pinned."""

    request_id: Name
    hashes: Hashes


class EndSession(Message, frozen=True, tag="END_SESSION"):
    """The request has ended: cancels its lookup, which is then a miss, and unpins its chunks."""

    request_id: Name


class Goodbye(Message, frozen=True, tag="GOODBYE"):
    """Closes the connection: the agent releases everything it holds for it. Not answered."""


class Clear(Message, frozen=True, tag="CLEAR"):
    """Removes the chunks of the caller's layouts whose hashes begin with ``epoch``; None: all.

    ``DONE`` answers when the host pool has dropped them (``count``). Disk and Redis follow, and may
    fail. Of workers that are registered elsewhere or nowhere (``remote``), only the parts in Redis
    are removed. Chunks of a named ``epoch`` are not stored from then on, and are removed once more
    a minute later, or whenever the tier answers again.
    """

    epoch: Epoch | None = None
    remote: AllRemoteParts = ()


class Trust(Message, frozen=True, tag="TRUST"):
    """An operator says that loads of all layouts are right; ``DONE`` counts the distrusted ones."""


class Status(Message, frozen=True, tag="STATUS"):
    """Asks for the agent's state and counters."""


class Why(Message, frozen=True, tag="WHY"):
    """Asks what became of requests: those with the id ``request``, or whose ids contain it.

    At most ``most``, the newest first. Of a single one, where its first missed chunk is now.
    """

    request: Name = ""
    most: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 20


class Layouts(Message, frozen=True, tag="LAYOUTS"):
    """Asks for the layouts of registered workers, and for those that Redis has descriptions of.

    Of those whose fingerprints begin with one of ``wanted``, in hex, also what decides them.
    """

    wanted: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)] = ()


class Ping(Message, frozen=True, tag="PING"):
    """A heartbeat, answered at once."""


# Answers (agent to engine)


class Welcome(Message, frozen=True, tag="WELCOME"):
    """Answers ``HELLO``. ``agent_start_time`` is field 22 of /proc/PID/stat, in clock ticks.

    ``canary_every``: one hit in this many is compared instead of loaded; 0: none. ``store_after``:
    chunks are written once this number of requests has named them.
    """

    agent_id: str
    agent_pid: int
    agent_start_time: int
    chunk_size_tokens: int
    lookup_deadline_s: float
    package_version: str
    canary_every: int = 0
    store_after: int = 1


class ChunkSize(Message, frozen=True, tag="CHUNK_SIZE"):
    """Answers ``GET_CHUNK_SIZE``."""

    chunk_size_tokens: int


class Done(Message, frozen=True, tag="DONE"):
    """The operation succeeded; ``count`` is the number of objects affected."""

    count: int = 0


# Where a chunk was when it was looked up.
TIER_NAMES = MappingProxyType({kind.letter: kind.name for kind in KINDS})
_LETTERS = "".join(TIER_NAMES)
Tiers = Annotated[str, msgspec.Meta(pattern=f"^[{_LETTERS}]*$")]
Tier = Annotated[str, msgspec.Meta(pattern=f"^[{_LETTERS}]$")]


class LookupResult(Message, frozen=True, tag="LOOKUP_RESULT"):
    """Answers ``LOOKUP``: ``hit_chunks`` leading chunks are cached for every rank, and pinned here.

    ``tiers``: of each, a key of ``TIER_NAMES``. ``compare_only``: they may not be loaded.
    """

    hit_chunks: int
    tiers: Tiers = ""
    compare_only: bool = False


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Chunks whose part, by its index in ``WATCH``, is in a tier now, or no longer (``there``)."""

    part: Annotated[int, msgspec.Meta(ge=0)]
    tier: Tier
    there: bool
    hashes: tuple[ChunkHash, ...]

    @property
    def tier_name(self) -> str:
        return TIER_NAMES[self.tier]


class Changes(Message, frozen=True, tag="CHANGES"):
    """Answers ``WATCH``: the last change of each part of a chunk in each tier, oldest first.

    It may name again what has not changed. ``lost``: too many came, and earlier ones were dropped.
    """

    changes: tuple[Change, ...]
    lost: bool = False


class StoreResult(Message, frozen=True, tag="STORE_RESULT"):
    """Answers ``STORE``: the blocks are no longer read. The three counts add up to the chunks.

    ``already_cached``: in the host pool. Whether Redis has a chunk is checked when it is written.
    """

    stored: int
    already_cached: int
    dropped: int


class RetrieveResult(Message, frozen=True, tag="RETRIEVE_RESULT"):
    """Answers ``RETRIEVE``: indices into ``hashes`` of those that were not copied."""

    failed_chunks: tuple[int, ...]


class StatusReport(Message, frozen=True, tag="STATUS_REPORT"):
    """Answers ``STATUS``, ``WHY`` and ``LAYOUTS``: a JSON document."""

    report: bytes


class Pong(Message, frozen=True, tag="PONG"):
    """Answers ``PING``.

    mapping: a registration is in progress, so answers may be late. known: the connection has sent
    HELLO, and the agent has not forgotten its peer since.
    """

    agent_pid: int
    package_version: str
    mapping: bool = False
    known: bool = True


class Failure(Message, frozen=True, tag="FAILURE"):
    """The operation failed or was refused. ``code`` is one of the five constants below."""

    code: str
    reason: str


VERSION_MISMATCH = "VERSION_MISMATCH"
UNKNOWN_PEER = "UNKNOWN_PEER"
BAD_MESSAGE = "BAD_MESSAGE"
REFUSED = "REFUSED"
FAILED = "FAILED"

Question = (
    Hello | GetChunkSize | RegisterKVCache | UnregisterKVCache | Lookup | Watch | Store | Compare
    | Retrieve | HoldStores | ReleaseLocks | EndSession | Goodbye | Clear | Trust | Status | Why
    | Layouts | Ping
)  # fmt: skip
Answer = (
    Welcome | ChunkSize | Done | LookupResult | Changes | StoreResult | RetrieveResult
    | StatusReport | Pong | Failure
)  # fmt: skip
