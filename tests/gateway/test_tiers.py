"""The real tiers behind a gateway, in one process."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from lmcache_redis.gateway.config import GatewayConfig
from lmcache_redis.gateway.main import open_tiers
from tests.gateway.serving import Serving
from tests.gateway.wire import GET, PUT, SUCCESS, header
from tests.servers import RedisServer

pytestmark = pytest.mark.servers

FORMS = [
    (24, 1, 3, (2, 3, 1, 2)), (24, 2, 2, (3, 2, 2, 0)), (9, 4, 0, (9, 0, 0, 0)),
    (9, 5, 6, (77, 0, 3, 0)), (4096, 1, 3, (3, 5, 7, 2)), (5, 0, 4, (0, 0, 0, 0)),
    (1_500_000, 3, 6, (1_500_000, 1, 0, 0)), (7, 6, 0, (1, 2, 3, 4)),
]  # fmt: skip


@pytest.mark.parametrize("tiers", ["memory", "disk", "redis", "all"])
def test_whatever_a_request_says_is_in_the_reply(tmp_path: Path, tiers: str) -> None:
    redis_directory = tmp_path / "redis"
    redis_directory.mkdir()
    with RedisServer(redis_directory) as redis:
        everything = tiers == "all"
        on_disk = tiers in ("disk", "all")
        config = GatewayConfig(
            memory_bytes=16 << 20 if everything or tiers == "memory" else 0,
            disk_path=str(tmp_path / "disk") if on_disk else None,
            disk_size=16 << 20,
            redis_url=redis.url if everything or tiers == "redis" else None,
        )
        backend = open_tiers(config)
        try:
            sizes = {"buffer_bytes": 8 << 20, "max_payload_bytes": 4 << 20}
            with Serving(backend, **sizes) as serving, serving.client() as client:
                for number, (length, fmt, dtype, shape) in enumerate(FORMS):
                    payload = random.Random(number).randbytes(length)
                    key = f"m@1@0@{number:x}@half"
                    client.send(header(PUT, key, length, fmt, dtype, shape) + payload)
                    client.send(header(GET, key))
                    assert client.reply() == (SUCCESS, length, fmt, dtype, shape, 0)
                    assert client.receive(length) == payload
                client.send(header(PUT, "m@1@0@ff@half"))
                assert not client.exists("m@1@0@ff@half"), "tiers have no chunks of no bytes"
                assert client.list() == {f"m@1@0@{n:x}@half" for n in range(len(FORMS))}
        finally:
            backend.close()


def test_many_clients_on_all_tiers(tmp_path: Path) -> None:
    """Memory holds a third of the chunks, buffers fewer still: nothing mixes, nothing is lost."""
    redis_directory = tmp_path / "redis"
    redis_directory.mkdir()
    problems: list[BaseException] = []
    with RedisServer(redis_directory) as redis:
        config = GatewayConfig(memory_bytes=2 << 20, redis_url=redis.url)
        backend = open_tiers(config)
        try:
            with Serving(backend, buffer_bytes=2 << 20, max_payload_bytes=1 << 20) as serving:

                def work(number: int) -> None:
                    source = random.Random(number)
                    chunks = [source.randbytes(source.randrange(200_000)) for _ in range(4)]
                    try:
                        with serving.client() as client:
                            for turn, chunk in enumerate(chunks):
                                client.put(f"m@16@{number}@{turn:02x}@half", chunk)
                            for turn, chunk in enumerate(chunks):
                                assert client.get(f"m@16@{number}@{turn:02x}@half") == chunk
                    except BaseException as problem:
                        problems.append(problem)

                threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert problems == []
                assert serving.stats()["hits"] == 64
        finally:
            backend.close()
