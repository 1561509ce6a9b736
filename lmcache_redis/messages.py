"""The wire between engines and the agent: message types and the protocol they follow.

Transport
---------
ZeroMQ DEALER (engine side) to ROUTER (agent). One message is two frames: a preamble
(``PREAMBLE``: magic and protocol version, compared before anything is decoded) and one
msgpack-encoded tagged Struct from this module. KV bytes never travel here; they move
through memory that both sides map.

Order of events
---------------
1. ``HELLO`` opens a connection and names the engine, the role and, for a worker, its rank.
   The agent answers ``WELCOME`` with its identity (``agent_id`` is new in every process),
   its process, and its chunk size. Anything but ``HELLO`` (``PING``, ``STATUS`` and
   ``GET_CHUNK_SIZE`` excepted) from a stranger is answered ``FAILURE(UNKNOWN_PEER)``: that is how a
   client notices that the agent was restarted.
2. A worker sends ``REGISTER_KV_CACHE`` with its layout, the layout's fingerprint and handles to
   its memory. The agent maps the memory before it answers ``DONE``. Until then, stores
   and retrieves of that worker are failures, and lookups of its engine wait, within their
   deadline; where no registration is to be expected they find nothing.
3. The scheduler sends ``LOOKUP``. The agent answers ``LOOKUP_RESULT`` when every chunk of the
   answer sits pinned in its host pool, or at ``lookup_deadline_s``. The pins belong to
   ``(engine_id, request_id)`` until each rank has retrieved its chunk, ``RELEASE_LOCKS``
   names it, ``END_SESSION`` ends the request, or the session times out.
4. A worker sends ``RETRIEVE``: pinned chunks are copied into the named blocks, then
   ``RETRIEVE_RESULT`` lists the chunks that were not (indices into ``chunks``).
5. A worker sends ``STORE``: blocks are copied out into slots, then ``STORE_RESULT`` says that the
   blocks are no longer read. Writing to Redis happens after that, unseen by the engine.

Leases
------
``STORE`` and ``RETRIEVE`` carry ``lease_ns``, a time on ``CLOCK_MONOTONIC``, which engine and agent
share because they share a machine. The agent begins no copy after the lease, and looks at it before
each piece of one (1 MiB on the CPU).

- A store reads. The engine keeps its blocks until the answer comes or the lease has run out; what
  the agent reads past the lease it throws away. So a slow or stopped agent cannot cache the bytes
  of blocks that were reused.
- A retrieve writes. The engine keeps its blocks until the answer comes, the agent's process is
  gone, or the agent has answered a later ``REGISTER_KV_CACHE`` of that worker with ``DONE``, which
  it does only after the copies through the former mapping have ended (``UNREGISTER_KV_CACHE``
  likewise). So an agent that wakes up in the middle of a copy writes into blocks that no other
  request has.

Failure flows
-------------
- The preamble differs: ``FAILURE(VERSION_MISMATCH)`` with a sentence; the client stops asking.
- A message cannot be decoded or breaks a bound: ``FAILURE(BAD_MESSAGE)``, nothing is done. A frame
  of more than ``MAX_MESSAGE_BYTES`` is not received: the connection is closed.
- The agent has ``MAX_PEERS`` peers: ``FAILURE(REFUSED)`` to the ``HELLO`` of another.
- The agent dies: its socket closes, the client fails every pending call, says ``HELLO`` until
  somebody answers, and registers again.
- An engine dies or stays silent for longer than ``heartbeat_timeout_s``: the agent unpins its
  sessions, unmaps its memory and forgets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec

from lmcache_redis.device.handles import CudaIPCHandle, SharedMemoryHandle
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.errors import WireError
from lmcache_redis.keys import MAX_HASH_BYTES, IPCCacheEngineKey

PROTOCOL_VERSION = 2
MAGIC = b"LMCR-MP"
PREAMBLE = MAGIC + PROTOCOL_VERSION.to_bytes(2, "big")
MAX_MESSAGE_BYTES = 16 << 20
MAX_PEERS = 512

StorageHandle = SharedMemoryHandle | CudaIPCHandle
Epoch = Annotated[bytes, msgspec.Meta(max_length=8)]
# A block hash, and an adapter digest with a block hash: what may follow the epoch.
HASH_BYTES_OF_AN_EPOCH = (32, 48)
ChunkHash = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_HASH_BYTES)]
# What the agent keeps of a peer's text: a bound on each.
Name = Annotated[str, msgspec.Meta(max_length=1024)]


class VersionMismatch(WireError):
    """The peer speaks another version of the protocol."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages; ``call_id`` pairs an answer with its question."""

    call_id: int


# Questions (engine to agent)


class Hello(Message, frozen=True, tag="HELLO"):
    """Opens a connection. ``worker_id`` is None for the scheduler and for tools."""

    engine_id: Name
    model_name: Name
    world_size: int
    worker_id: int | None
    package_version: Name


class GetChunkSize(Message, frozen=True, tag="GET_CHUNK_SIZE"):
    """Asks for the chunk size in tokens."""


class RegisterKVCache(Message, frozen=True, tag="REGISTER_KV_CACHE"):
    """A worker's paged KV cache: what it looks like and where it is."""

    kv_rank: int
    layout: KVLayout
    fingerprint: bytes
    storages: tuple[StorageHandle, ...]


class UnregisterKVCache(Message, frozen=True, tag="UNREGISTER_KV_CACHE"):
    """The worker's memory is about to go away."""


class ChunkNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some chunks, in order, of the model and the ranks that ``HELLO`` has named.

    Hash mode: ``hashes``, one a chunk, all of one length. Token mode: ``tokens``, a key with
    token ids whose chunks in ``[start, end)`` are meant; then there are no hashes. The key's
    model, ranks and worker id (or None) are those of ``HELLO``; its salt is hashed with the tokens.
    """

    hashes: tuple[ChunkHash, ...] = ()
    tokens: IPCCacheEngineKey | None = None


class Lookup(Message, frozen=True, tag="LOOKUP"):
    """How many leading ones of ``chunks`` can be had? Loads them into the host pool."""

    request_id: Name
    chunks: ChunkNames


class Store(Message, frozen=True, tag="STORE"):
    """Copy blocks into the cache: ``blocks_per_chunk`` block ids for each of ``chunks``.

    ``event`` is a CUDA interprocess event after which the blocks may be read; None on the CPU.
    """

    request_id: Name
    chunks: ChunkNames
    block_ids: tuple[int, ...]
    lease_ns: int
    event: bytes | None = None


class Retrieve(Message, frozen=True, tag="RETRIEVE"):
    """Copy pinned chunks into blocks, but for blocks of the first ``skip_first_n_tokens``.

    ``event`` is a CUDA interprocess event after which the blocks may be written: the engine may
    still be zeroing them. None on the CPU.
    """

    request_id: Name
    chunks: ChunkNames
    block_ids: tuple[int, ...]
    skip_first_n_tokens: int
    lease_ns: int
    event: bytes | None = None


class ReleaseLocks(Message, frozen=True, tag="RELEASE_LOCKS"):
    """Unpins what a lookup of ``request_id`` pinned: ``chunks``."""

    request_id: Name
    chunks: ChunkNames


class EndSession(Message, frozen=True, tag="END_SESSION"):
    """The request is over: cancels its lookup, unpins everything it pinned."""

    request_id: Name


class Goodbye(Message, frozen=True, tag="GOODBYE"):
    """The connection ends on purpose: whatever the agent holds for it can go. Not answered."""


class Clear(Message, frozen=True, tag="CLEAR"):
    """Remove the chunks of the caller's layouts whose hashes begin with ``epoch``; None: all.

    A hash is ``epoch | adapter digest (0 or 16 bytes) | block hash (32 bytes)``. Answered ``DONE``
    when the chunks are gone from the host pool (``count``); disk and Redis follow, and may fail.
    """

    epoch: Epoch | None = None


class Status(Message, frozen=True, tag="STATUS"):
    """Asks for the agent's state and counters."""


class Ping(Message, frozen=True, tag="PING"):
    """A sign of life, answered at once."""


# Answers (agent to engine)


class Welcome(Message, frozen=True, tag="WELCOME"):
    """Answers ``HELLO``. ``agent_start_time`` is field 22 of /proc/PID/stat, in clock ticks."""

    agent_id: str
    agent_pid: int
    agent_start_time: int
    chunk_size_tokens: int
    lookup_deadline_s: float
    package_version: str


class ChunkSize(Message, frozen=True, tag="CHUNK_SIZE"):
    """Answers ``GET_CHUNK_SIZE``."""

    chunk_size_tokens: int


class Done(Message, frozen=True, tag="DONE"):
    """The question was carried out; ``count`` is how many things it touched."""

    count: int = 0


class LookupResult(Message, frozen=True, tag="LOOKUP_RESULT"):
    """Answers ``LOOKUP``: ``hit_chunks`` leading chunks are pinned, for every rank."""

    hit_chunks: int


class StoreResult(Message, frozen=True, tag="STORE_RESULT"):
    """Answers ``STORE``: the blocks are no longer read. The three counts add up to the chunks.

    ``already_cached``: held by the host pool before. What Redis has is found out later, when a
    chunk is written.
    """

    stored: int
    already_cached: int
    dropped: int


class RetrieveResult(Message, frozen=True, tag="RETRIEVE_RESULT"):
    """Answers ``RETRIEVE``: indices into ``chunks`` whose blocks do not hold theirs."""

    failed_chunks: tuple[int, ...]


class StatusReport(Message, frozen=True, tag="STATUS_REPORT"):
    """Answers ``STATUS``: a JSON document, for people and tools."""

    report: bytes


class Pong(Message, frozen=True, tag="PONG"):
    """Answers ``PING``."""

    agent_pid: int
    package_version: str


class Failure(Message, frozen=True, tag="FAILURE"):
    """The question was not carried out. ``code`` is one of the ``FAILURE_*`` names."""

    code: str
    reason: str


VERSION_MISMATCH = "VERSION_MISMATCH"
UNKNOWN_PEER = "UNKNOWN_PEER"
BAD_MESSAGE = "BAD_MESSAGE"
REFUSED = "REFUSED"
FAILED = "FAILED"

Question = (
    Hello
    | GetChunkSize
    | RegisterKVCache
    | UnregisterKVCache
    | Lookup
    | Store
    | Retrieve
    | ReleaseLocks
    | EndSession
    | Goodbye
    | Clear
    | Status
    | Ping
)
Answer = (
    Welcome
    | ChunkSize
    | Done
    | LookupResult
    | StoreResult
    | RetrieveResult
    | StatusReport
    | Pong
    | Failure
)


class _Envelope(msgspec.Struct):
    call_id: int = 0


_encoder = msgspec.msgpack.Encoder()
_question_decoder = msgspec.msgpack.Decoder(Question)
_answer_decoder = msgspec.msgpack.Decoder(Answer)
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)


def encode(message: Message) -> list[bytes]:
    """The two frames of ``message``."""
    return [PREAMBLE, _encoder.encode(message)]


def decode_question(frames: Sequence[bytes]) -> Question:
    """The question in ``frames`` (preamble, body). Raises ``WireError``, ``VersionMismatch``."""
    return cast(Question, _decode(_question_decoder, frames))


def decode_answer(frames: Sequence[bytes]) -> Answer:
    """The answer in ``frames`` (preamble, body). Raises ``WireError``, ``VersionMismatch``."""
    return cast(Answer, _decode(_answer_decoder, frames))


def _decode(decoder: msgspec.msgpack.Decoder[Any], frames: Sequence[bytes]) -> Any:
    if len(frames) != 2 or not frames[0].startswith(MAGIC):
        raise WireError("not a message of lmcache_redis: two frames with its preamble are expected")
    if frames[0] != PREAMBLE:
        theirs = int.from_bytes(frames[0][len(MAGIC) : len(PREAMBLE)], "big")
        raise VersionMismatch(
            f"the peer speaks protocol version {theirs}, this side {PROTOCOL_VERSION}: "
            "install the same lmcache-redis for vLLM and for the agent"
        )
    if len(frames[1]) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(frames[1])} bytes; at most {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(frames[1])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a message that cannot be decoded: {error}") from error


def call_id_of(frames: Sequence[bytes]) -> int:
    """The call that a message which was refused names; 0 where it names none."""
    try:
        return _envelope_decoder.decode(frames[1]).call_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError):
        return 0


def addressed(answer: Answer, call_id: int) -> Answer:
    """The answer with the id of the call it answers."""
    return msgspec.structs.replace(answer, call_id=call_id)
