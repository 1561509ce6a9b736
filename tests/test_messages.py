# SPDX-License-Identifier: Apache-2.0
"""Every message survives encoding and decoding; all other bytes are refused."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_redis import messages as m
from lmcache_redis import transport
from lmcache_redis.chunks.names import Reach
from lmcache_redis.device.handles import CudaIPCHandle, SharedMemoryHandle
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import WireError

HASHES = (b"h" * 32, b"i" * 32)
LAYOUT = KVLayout(
    identity=(("engine", "test"),),
    dtype="float32",
    device="cpu",
    block_size_tokens=16,
    num_blocks=4,
    segments=(Segment(0, 0, 1024, 1024),),
)
QUESTIONS: list[m.Message] = [
    m.Hello(1, "engine", "model", 2, None, "0.1.0"),
    m.Hello(1, "engine", "model", 2, 1, "0.1.0", unnamed=True, client_id="1f"),
    m.GetChunkSize(2),
    m.RegisterKVCache(
        3, (m.KVGroup(7, LAYOUT, b"f" * 32),), (SharedMemoryHandle(1, 2, 3, 4, 5, 6),)
    ),
    m.RegisterKVCache(
        3,
        (m.KVGroup(7, LAYOUT, b"f" * 32),),
        (CudaIPCHandle(1, 2, "d", b"h" * 64, 8192, 512, 4096),),
        SharedMemoryHandle(1, 2, 3, 4, 5, 6),
    ),
    m.UnregisterKVCache(4),
    m.Lookup(5, "r", HASHES),
    m.Lookup(5, "r", HASHES, 3, (m.RemoteParts(1, 7, b"f" * 32, Reach("window", 128)),)),
    m.Lookup(5, "r", HASHES, tenant="team", stored_chunks=2),
    m.Watch(5, (m.RemoteParts(1, 7, b"f" * 32, Reach("window", 128)),)),
    m.Store(6, "r", HASHES, (1, 2, 3, 4), 10**15, 7),
    m.Compare(6, "r", HASHES, (1, 2, 3, 4), 10**15, None, 1, client_named=2),
    m.Retrieve(7, "r", HASHES, (1, 2, 3, 4), 32, 10**15),
    m.HoldStores(8, True),
    m.ReleaseLocks(8, "r", HASHES),
    m.EndSession(9, "r"),
    m.Goodbye(10),
    m.Clear(11),
    m.Clear(11, b"e" * 8, (m.RemoteParts(1, 7, b"f" * 32, Reach()),)),
    m.Trust(11),
    m.Status(12),
    m.Why(12, "chatcmpl-1", 1),
    m.Layouts(12),
    m.Ping(13),
]
ANSWERS: list[m.Message] = [
    m.Welcome(1, "agent", 1, 2, 256, 1.0, "0.1.0", 1000),
    m.ChunkSize(2, 256),
    m.Done(3, 4),
    m.LookupResult(4, 16),
    m.LookupResult(4, 3, "hdr"),
    m.LookupResult(4, 1, "r", compare_only=True),
    m.Changes(4, (m.Change(0, "h", True, (b"h" * 32, b"i" * 48)),), True),
    m.StoreResult(5, 1, 2, 3),
    m.RetrieveResult(6, (0, 5)),
    m.StatusReport(7, b"{}"),
    m.Pong(8, 1, "0.1.0"),
    m.Pong(8, 1, "0.1.0", True, known=False),
    m.Failure(9, m.REFUSED, "because"),
]


def test_messages_survive_the_wire() -> None:
    decoders = (transport.decode_question, transport.decode_answer)
    for messages, (ours, theirs) in ((QUESTIONS, decoders), (ANSWERS, decoders[::-1])):
        for message in messages:
            assert ours(transport.encode(message)) == message
            with pytest.raises(WireError):
                theirs(transport.encode(message))


def test_a_message_in_bytes() -> None:
    assert transport.encode(m.Ping(7)) == [
        b"LMCR-MP\x00\x09",
        bytes.fromhex("82 a4 74797065 a4 50494e47 a7 63616c6c5f6964 07"),
    ]


def test_another_version_is_told_from_garbage() -> None:
    frames = transport.encode(m.Ping(1))
    with pytest.raises(transport.VersionMismatch, match="version 258"):
        transport.decode_question([m.MAGIC + b"\x01\x02", frames[1]])
    for preamble in (b"", b"LMCR", b"x" * 9, m.PREAMBLE[:-1], m.PREAMBLE + b"\0"):
        with pytest.raises(WireError):
            transport.decode_question([preamble, frames[1]])
    for frames in ([], [m.PREAMBLE], [m.PREAMBLE, b"", b""]):
        with pytest.raises(WireError):
            transport.decode_question(frames)


def test_a_batch_is_split_into_its_questions() -> None:
    batch = [m.Ping(n) for n in range(m.MAX_BATCH)]
    frames = transport.encode(*batch)
    assert frames[1:].count(m.PREAMBLE) == 0
    assert [transport.decode_question(each) for each in transport.split(frames)] == batch
    single = transport.encode(m.Ping(1))
    assert transport.split(single) == [single]
    for wrong in ([], [m.PREAMBLE], transport.encode(*batch, m.Ping(99)), [b"x", *frames[1:]]):
        (one,) = transport.split(wrong)
        with pytest.raises(WireError):
            transport.decode_question(one)


def _lookup(*hashes: object, **fields: object) -> dict[str, object]:
    return {"type": "LOOKUP", "call_id": 1, "request_id": "r", "hashes": hashes, **fields}


def test_unknown_fields_and_types_are_refused() -> None:
    for fields in (
        {"type": "PING", "call_id": 1, "more": 2},
        {"type": "PING", "call_id": "1"},
        {"type": "PING"},
        {"type": "SHUTDOWN", "call_id": 1},
        {"call_id": 1},
        _lookup(b""),
        _lookup(b"h" * 64),
        _lookup("h"),
        _lookup(b"h", first_chunk=-1),
        _lookup(b"h", first_chunk=1 << 32),
        _lookup(b"h", names=[b"h"]),
    ):
        with pytest.raises(WireError):
            transport.decode_question([m.PREAMBLE, msgspec.msgpack.encode(fields)])


def test_a_message_that_is_too_long_is_not_decoded() -> None:
    with pytest.raises(WireError, match="at most"):
        transport.decode_question([m.PREAMBLE, bytes(m.MAX_MESSAGE_BYTES + 1)])


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_raise_only_wire_errors(body: bytes) -> None:
    for decode in (transport.decode_question, transport.decode_answer):
        with pytest.raises(WireError):
            decode([m.PREAMBLE, body])


@settings(deadline=None)
@given(st.sampled_from(QUESTIONS), st.data())
def test_changed_messages_raise_only_wire_errors(message: m.Message, data: st.DataObject) -> None:
    body = bytearray(transport.encode(message)[1])
    position = data.draw(st.integers(0, len(body) - 1))
    body[position] = data.draw(st.integers(0, 255))
    try:
        transport.decode_question([m.PREAMBLE, bytes(body)])
    except WireError:
        return


# Of the names, types and bounds of every message. Both sides refuse what they do not know, so any
# change of them is another version of the protocol.
SCHEMAS = {
    3: "0fb9dc40b9e5286b",
    4: "ee3b37c67e1175b8",
    5: "a8ccd19ec9ce0491",
    6: "e65f263eb7909868",
    7: "a88dd8bc66744943",
    8: "8d3bb728837fa4d3",
    9: "712d3971d227b3d8",
}


def test_a_change_of_a_message_changes_the_version() -> None:
    def without_words(schema: Any) -> Any:
        if isinstance(schema, (list, tuple)):
            return [without_words(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        known = {name: without_words(s) for name, s in schema.items() if name != "description"}
        if "anyOf" in known:  # versions of msgspec differ in the order of a type's alternatives
            known["anyOf"].sort(key=partial(json.dumps, sort_keys=True))
        return known

    kinds = [*get_args(m.Question), *get_args(m.Answer)]
    schemas = without_words(msgspec.json.schema_components(kinds))
    digest = hashlib.sha256(msgspec.json.encode(schemas, order="sorted")).hexdigest()[:16]
    assert SCHEMAS.get(m.PROTOCOL_VERSION) == digest, (
        "messages have changed: raise PROTOCOL_VERSION, and add its digest here; "
        "docs/guides/node.md says what an upgrade then means"
    )


def test_the_page_names_the_version() -> None:
    page = (Path(__file__).parent.parent / "docs/reference/protocol.md").read_text()
    words = " ".join(page.split())
    assert f"protocol version as u16, big-endian, now {m.PROTOCOL_VERSION})" in words
    for failure in (m.VERSION_MISMATCH, m.UNKNOWN_PEER, m.BAD_MESSAGE, m.REFUSED, m.FAILED):
        assert f"`{failure}`" in words
