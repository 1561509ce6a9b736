# SPDX-License-Identifier: Apache-2.0
"""The facade of lmcache.v1.protocol."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from lmcache_redis import compat
from lmcache_redis.chunks import metadata as protocol
from lmcache_redis.compat import lm_wire
from lmcache_redis.compat.protocol import (
    DTYPE_TO_INT,
    INT_TO_DTYPE,
    CacheEngineKey,
    ClientCommand,
    ClientMetaMessage,
    LayerCacheEngineKey,
    MemoryFormat,
    RemoteMetadata,
    ServerMetaMessage,
    ServerReturnCode,
    get_remote_metadata_bytes,
    init_remote_metadata_info,
)
from lmcache_redis.errors import FormatError
from tests.compat.gateway.serving import Serving

CACHE_KEY = CacheEngineKey("org/model", 8, 3, bytes(range(32)), torch.bfloat16)
LAYER_KEY = CACHE_KEY.get_first_layer()


@pytest.mark.servers
def test_the_documented_calls_with_a_server() -> None:
    shape = torch.Size([2, 32, 256, 128])
    length = math.prod(shape) * 2
    payload = random.Random(1).randbytes(length)
    sizes = {"buffer_bytes": 32 << 20, "memory_bytes": 16 << 20}
    with Serving([], **sizes) as serving, serving.client() as client:

        def ask(command: ClientCommand, key: Any) -> ServerMetaMessage:
            msg = ClientMetaMessage(command, key, 0, MemoryFormat.KV_BLOB, None, torch.Size([0]))
            client.send(msg.serialize())
            raw_bytes = client.receive(ServerMetaMessage.packlength())
            return ServerMetaMessage.deserialize(raw_bytes)

        for cache_key in (CACHE_KEY, LAYER_KEY, CacheEngineKey("vllm", "m", 2, 1, "00ff")):
            assert ask(ClientCommand.EXIST, cache_key).code == ServerReturnCode.FAIL
            msg = ClientMetaMessage(
                command=ClientCommand.PUT,
                key=cache_key,
                length=length,
                fmt=MemoryFormat.KV_BLOB,
                dtype=torch.float16,
                shape=shape,
            )
            data = msg.serialize()
            assert len(data) == ClientMetaMessage.packlength()
            client.send(data + payload)
            assert ask(ClientCommand.EXIST, cache_key).code == ServerReturnCode.SUCCESS
            response = ask(ClientCommand.GET, cache_key.to_string())
            assert response == ServerMetaMessage(
                code=ServerReturnCode.SUCCESS,
                length=length,
                fmt=MemoryFormat.KV_BLOB,
                dtype=torch.float16,
                shape=shape,
            )
            assert client.receive(response.length) == payload
        listed = ask(ClientCommand.LIST, "")
        texts = client.receive(listed.length).decode().split("\n")
        assert {CACHE_KEY.to_string(), LAYER_KEY.to_string(), "vllm@m@2@1@00ff"} == {*texts}
        assert ask(ClientCommand.HEALTH, "").code == ServerReturnCode.SUCCESS


class TestClientMetaMessage:
    message = ClientMetaMessage(
        ClientCommand.PUT,
        CACHE_KEY,
        4096,
        MemoryFormat.KV_BLOB,
        torch.float16,
        torch.Size([2, 32, 16, 2]),
        "LocalDiskBackend",
    )

    def test_comes_back_with_the_types_of_its_fields(self) -> None:
        for key in (CACHE_KEY, LAYER_KEY):
            again = ClientMetaMessage.deserialize(replace(self.message, key=key).serialize())
            assert again == replace(self.message, key=key)
            assert type(again.key) is type(key)
            assert (type(again.shape), again.dtype) == (torch.Size, torch.float16)
            assert again.command is ClientCommand.PUT
            assert again.location == "LocalDiskBackend"

    def test_has_the_bytes_of_the_protocol(self) -> None:
        payload = lm_wire.PayloadFields(
            4096, MemoryFormat.KV_2LTD, "float16", (2, 32, 16, 2), "LocalDiskBackend"
        )
        assert self.message.serialize() == lm_wire.packed_request(
            ClientCommand.PUT, CACHE_KEY.to_string(), payload
        )

    def test_a_request_without_a_key(self) -> None:
        message = replace(self.message, command=ClientCommand.HEALTH, key="")
        assert ClientMetaMessage.deserialize(message.serialize()) == message

    @pytest.mark.parametrize(
        "changes",
        [
            {"key": "no key"}, {"key": None}, {"key": 5}, {"length": -1}, {"dtype": torch.int64},
            {"shape": None}, {"shape": 5}, {"location": ["LocalDiskBackend"]},
            {"key": CacheEngineKey("m" * 150, 1, 0, 5, torch.half)},
        ],
    )  # fmt: skip
    def test_what_has_no_encoding_is_refused(self, changes: dict[str, Any]) -> None:
        """`test_lm_wire` has all of it."""
        with pytest.raises(FormatError):
            replace(self.message, **changes)

    def test_malformed_bytes_are_refused(self) -> None:
        data = self.message.serialize()
        no_key = data[:36] + b"no key".ljust(150)
        for each in (b"", data[:-1], data + b"\0", b"\x09" + data[1:], no_key):
            with pytest.raises(FormatError):
                ClientMetaMessage.deserialize(each)


class TestServerMetaMessage:
    message = ServerMetaMessage(
        ServerReturnCode.SUCCESS,
        8,
        MemoryFormat.KV_T2D,
        None,
        torch.Size([2, 4]),
        "LocalCPUBackend",
    )

    def test_comes_back_with_the_types_of_its_fields(self) -> None:
        data = self.message.serialize()
        assert len(data) == ServerMetaMessage.packlength() == 36
        again = ServerMetaMessage.deserialize(memoryview(data))
        assert again == self.message
        assert type(again.shape) is torch.Size
        assert again.code is ServerReturnCode.SUCCESS
        assert (again.dtype, again.location) == (None, "LocalCPUBackend")
        with pytest.raises(FormatError):
            replace(self.message, code=300)  # type: ignore[arg-type]


SHAPES = [torch.Size([2, 32, 16, 8]), torch.Size([4, 4])]
DTYPES = [torch.bfloat16, torch.uint8]


class TestRemoteMetadata:
    metadata = RemoteMetadata(2 * 32 * 16 * 8 * 2 + 16, SHAPES, DTYPES, MemoryFormat.KV_2LTD)

    def test_comes_back_with_the_types_of_its_fields(self) -> None:
        again = RemoteMetadata.deserialize(self.metadata.serialize())
        assert again == self.metadata
        assert (again.shapes, again.dtypes) == (SHAPES, DTYPES)
        assert [type(shape) for shape in again.shapes] == [torch.Size] * 2
        assert (type(again.shapes), type(again.dtypes)) == (list, list)

    def test_has_the_encoding_of_the_package(self) -> None:
        encoded = protocol.RemoteMetadata(
            self.metadata.length, SHAPES, DTYPES, MemoryFormat.KV_2LTD
        )
        assert self.metadata.serialize() == encoded.serialize()

    def test_what_follows_it_is_not_read(self) -> None:
        """As in LMCache's connectors: one buffer holds metadata and then the payload."""
        for rest in (b"\xff", b"\xff" * 4096):
            assert RemoteMetadata.deserialize(self.metadata.serialize() + rest) == self.metadata
        with pytest.raises(FormatError, match="followed by bytes that are not zero"):
            protocol.RemoteMetadata.deserialize(self.metadata.serialize() + b"x")

    def test_a_beginning_of_it_is_refused(self) -> None:
        encoded = self.metadata.serialize()
        for length in range(len(encoded)):
            with pytest.raises(FormatError):
                RemoteMetadata.deserialize(encoded[:length])

    def test_into_a_buffer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compat.protocol, "_group_count", None)
        init_remote_metadata_info(2)
        size = get_remote_metadata_bytes()
        buffer = bytearray(b"\xff" * (size + 8))
        assert self.metadata.serialize_into(buffer) == size
        assert buffer[size:] == b"\xff" * 8
        assert RemoteMetadata.deserialize(memoryview(buffer)[:size]) == self.metadata
        short = bytearray(size - 1)
        with pytest.raises(FormatError, match=f"{size - 1} bytes do not hold metadata of {size}"):
            self.metadata.serialize_into(short)
        assert short == bytes(size - 1)

    @pytest.mark.parametrize(
        ("length", "shapes", "dtypes"),
        [
            (4096, [torch.Size([2, 32, 256, 128])], [torch.float16]),  # of the documentation
            (0, [torch.Size([2, 32, 256, 128])], [torch.float16]),
            ((1 << 63) - 1, [torch.Size([1])], [torch.uint8]),
            (100, [torch.Size([2, 256, 128, 0])], [torch.bfloat16]),  # padded
            (100, [torch.Size([0, 0, 0, 0])], [None]),
            (42, [torch.Size([7]), torch.Size([])], [None, torch.int8]),
            (999, [torch.Size([1, 2, 3, 4])] * 8, [torch.float8_e5m2] * 8),
            (3, [], []),
        ],
    )
    def test_its_fields_need_not_agree(
        self, length: int, shapes: list[torch.Size], dtypes: list[torch.dtype | None]
    ) -> None:
        """LMCache's connectors count a header in the length, and pad shapes."""
        metadata = RemoteMetadata(length, shapes, dtypes, MemoryFormat.BINARY)
        buffer = bytearray(metadata.serialize())
        assert RemoteMetadata.deserialize(buffer) == metadata
        metadata.length += 176 if length < 1 << 62 else -176
        metadata.serialize_into(buffer)
        again = RemoteMetadata.deserialize(buffer + b"rest")
        assert again == metadata
        assert (again.length, again.shapes, again.dtypes) == (metadata.length, shapes, dtypes)

    @pytest.mark.parametrize(
        "changes",
        [
            {"length": -1}, {"length": 1 << 63}, {"length": 1.5}, {"shapes": []},
            {"dtypes": [torch.int8]}, {"fmt": 1}, {"dtypes": [torch.complex64, torch.uint8]},
            {"shapes": [(1,) * 9, (1,)]}, {"shapes": [1, 1]}, {"shapes": [(-1,), (1,)]},
        ],
    )  # fmt: skip
    def test_what_has_no_encoding_is_refused(self, changes: dict[str, Any]) -> None:
        with pytest.raises(FormatError):
            replace(self.metadata, **changes)


@pytest.mark.parametrize("value", [None, 16, 1 << 60, "metadata", [0] * 16])
def test_only_bytes_are_decoded(value: Any) -> None:
    """bytes(n) would be n zeros: metadata of no groups, or all memory."""
    for kind in (RemoteMetadata, ClientMetaMessage, ServerMetaMessage):
        with pytest.raises((TypeError, FormatError), match="bytes-like"):
            kind.deserialize(value)  # type: ignore[attr-defined]


def test_the_numbers_of_the_protocol() -> None:
    assert [each.value for each in ClientCommand] == [1, 2, 3, 4, 5]
    assert (ServerReturnCode.SUCCESS, ServerReturnCode.FAIL) == (200, 400)
    assert DTYPE_TO_INT[torch.half] == DTYPE_TO_INT[torch.float16] == 2
    assert INT_TO_DTYPE[1] is INT_TO_DTYPE[2] is torch.float16
    assert [*INT_TO_DTYPE] == [*range(9)]
    assert [*DTYPE_TO_INT.values()] == [0, *range(2, 9)]
    for code, dtype in INT_TO_DTYPE.items():
        assert DTYPE_TO_INT[dtype] == (2 if code == 1 else code)
        message = replace(TestServerMetaMessage.message, dtype=dtype)
        assert message.serialize()[12:16] == DTYPE_TO_INT[dtype].to_bytes(4, sys.byteorder)
    assert issubclass(LayerCacheEngineKey, CacheEngineKey)


def test_the_size_of_metadata_is_said_once_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.protocol, "_group_count", None)
    with pytest.raises(RuntimeError):
        get_remote_metadata_bytes()
    for groups in range(9):
        init_remote_metadata_info(groups)
        shapes, dtypes = [torch.Size([0])] * groups, [torch.uint8] * groups
        metadata = RemoteMetadata(0, shapes, dtypes, MemoryFormat.UNDEFINED).serialize()
        assert get_remote_metadata_bytes() == len(metadata)
    for groups in (-1, 9, True):
        with pytest.raises(FormatError):
            init_remote_metadata_info(groups)
