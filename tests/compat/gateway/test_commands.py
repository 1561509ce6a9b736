# SPDX-License-Identifier: Apache-2.0
"""Every command, as a client sees it."""

from __future__ import annotations

import random
import struct
import threading

import pytest

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from tests.compat.gateway.serving import DictTier, Serving
from tests.compat.gateway.wire import (
    BFLOAT16,
    BINARY,
    EXIST,
    FAIL,
    FAILED,
    GET,
    HEALTH,
    KEY,
    LIST,
    PUT,
    SUCCEEDED,
    SUCCESS,
    UINT8,
    Client,
    header,
    put,
)


def test_a_chunk_comes_back_as_it_was_put(client: Client, backend: DictTier) -> None:
    payload = random.Random(1).randbytes(2 * 3 * 5 * 7 * 2)
    client.send(header(PUT, KEY, len(payload), 1, BFLOAT16, (2, 3, 5, 7)) + payload)
    client.send(header(GET, KEY))
    assert client.reply() == (SUCCESS, len(payload), 1, BFLOAT16, (2, 3, 5, 7), 0)
    assert client.receive(len(payload)) == payload
    ((key, metadata),) = backend.chunks.items()
    rank = ObjectKey.ComputeKVRank(4, 3, 4, 3)
    assert key == ObjectKey(bytes.fromhex("00ff5577aa"), "org/model@4@3@@bfloat16", rank)
    assert metadata == RemoteMetadata(420, [(2, 3, 5, 7)], ["bfloat16"], MemoryFormat.KV_2LTD)


def test_the_replies_without_a_payload_are_these_bytes(client: Client) -> None:
    for command, reply in ((GET, FAILED), (EXIST, FAILED), (HEALTH, SUCCEEDED)):
        client.send(header(command))
        assert client.receive(36) == reply
    client.put(KEY, b"x")
    client.send(header(EXIST))
    assert client.receive(36) == SUCCEEDED
    client.send(header(LIST))
    assert client.receive(36) == struct.pack(
        "iiiiiiiii", SUCCESS, len(KEY), BINARY, UINT8, len(KEY), 0, 0, 0, 0
    )


def test_a_put_of_no_bytes_is_not_stored(client: Client, serving: Serving) -> None:
    client.put(KEY, b"")
    assert client.get(KEY) is None
    client.put(KEY, b"first")
    client.put(KEY, b"")
    assert client.get(KEY) == b"first"
    assert (serving.stats()["puts_stored"], serving.stats()["puts_not_stored"]) == (1, 2)


def test_a_chunk_may_fill_the_limit_exactly(client: Client, serving: Serving) -> None:
    for nbytes in (4095, 4096, 4097, 1 << 19):
        payload = random.Random(nbytes).randbytes(nbytes)
        client.put(KEY, payload)
        assert client.get(KEY) == payload
    total = 3 * 4096 + (1 << 19)
    serving.until(payload_bytes_in=total, payload_bytes_out=total)


def test_list_names_all_keys_and_no_others(client: Client, backend: DictTier) -> None:
    assert client.list() == set()
    keys = {
        "m@1@0@ab@half", "m@1@0@abc@half", "m@1@0@-ab@half", "m@1@0@ab@half@0",
        "m@1@0@ab@half@31@who%me@empty%", "ä b@255@255@ab@fp8_e4m3fn",
    }  # fmt: skip
    for key in keys:
        client.put(key, key.encode())
    for name in ("m", "m@1@0@@half@0@", "m@1@0@~@half", "m@1@0@@half", "m@2@0@@half"):
        foreign = ObjectKey(b"\xab\xcd\xef", name, ObjectKey.ComputeKVRank(2, 0, 2, 1))
        backend.add(foreign)
    assert client.list() == keys
    for key in keys:
        assert client.exists(key)
        assert client.get(key) == key.encode()


def test_a_long_list(client: Client, backend: DictTier, serving: Serving) -> None:
    """It may take a KiB of a payload's memory for each key."""
    keys = {f"model@1@0@{number:016x}@half" for number in range(500)}
    for key in keys:
        number = bytes.fromhex(key.split("@")[3])
        object_key = ObjectKey(number, "model@1@0@@half", ObjectKey.ComputeKVRank(1, 0, 1, 0))
        backend.add(object_key)
    assert client.list() == keys
    for number in range(50):
        object_key = ObjectKey(
            number.to_bytes(8, "little"), "m@1@0@@half", ObjectKey.ComputeKVRank(1, 0, 1, 0)
        )
        backend.add(object_key)
    client.send(header(LIST))
    assert client.reply()[0] == FAIL
    assert client.healthy()
    assert serving.stats()["malformed_requests"] == 1


@pytest.mark.parametrize("step", [5, 185, 187, 1000, 4096])
def test_in_pieces_of_any_size(client: Client, step: int) -> None:
    payloads = [random.Random(n).randbytes(n * 1777) for n in range(1, 7)]
    stream = b"".join(put(f"m@1@0@{n}0@half", each) for n, each in enumerate(payloads))
    for at in range(0, len(stream), step):
        client.send(stream[at : at + step])
    for number, payload in enumerate(payloads):
        assert client.get(f"m@1@0@{number}0@half") == payload


def test_pipelined_requests_are_answered_in_order(client: Client, serving: Serving) -> None:
    rounds = 200
    requests = []
    for number in range(rounds):
        key = f"m@1@0@{number:04x}@half"
        stored = put(key, key.encode() * (1 + number % 7))
        requests += [header(EXIST, key), stored, header(GET, key)]
        requests += [header(EXIST, key), header(HEALTH, "")]
    sender = threading.Thread(target=client.send, args=(b"".join(requests),))
    sender.start()
    for number in range(rounds):
        payload = f"m@1@0@{number:04x}@half".encode() * (1 + number % 7)
        assert client.receive(36) == FAILED
        assert client.reply()[:2] == (SUCCESS, len(payload))
        assert client.receive(len(payload)) == payload
        assert client.receive(72) == SUCCEEDED * 2
    sender.join()
    serving.until(requests_put=rounds, puts_stored=rounds, gets_hit=rounds, malformed_requests=0)
    serving.until(requests_exist=2 * rounds, requests_health=rounds)
