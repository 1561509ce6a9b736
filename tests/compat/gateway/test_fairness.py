"""Slow clients beside others: room for what they sent, not for what they announced."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import pytest

from tests.compat.gateway.conftest import NewLoop
from tests.compat.gateway.serving import DictTier, Serving
from tests.compat.gateway.wire import GET, KEY, Client, header, put

pytestmark = pytest.mark.servers

MIB = 1 << 20
SMALL = {"buffer_bytes": MIB, "slot_bytes": 4096, "max_payload_bytes": MIB // 4}
LARGE = {"buffer_bytes": 64 * MIB, "slot_bytes": MIB // 4, "max_payload_bytes": 16 * MIB}
# Longer than any client here waits: whoever is held up until then fails.
FOR_EVER = {"stall_timeout_s": 600.0}


def key(number: int) -> str:
    return f"m@1@0@{number:04x}@half"


@contextlib.contextmanager
def clients(serving: Serving, count: int) -> Iterator[list[Client]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serving.client()) for _ in range(count)]


class Trickle:
    """A thread that sends one byte of each client's payload now and then."""

    def __init__(self, slow: list[Client]) -> None:
        self._slow = slow
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.wait(0.02):
            for client in self._slow:
                with contextlib.suppress(OSError):
                    client.send(b"x")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("sizes", [SMALL, LARGE])
def test_who_announces_much_and_trickles_takes_no_room_from_others(
    sizes: dict[str, int], memory: bool, any_loop: NewLoop
) -> None:
    """Eight times as many as the buffers hold of what they announced."""
    nbytes = sizes["max_payload_bytes"]
    kept = {"memory_bytes": 64 * MIB if memory else 0}
    with (
        Serving(DictTier(), any_loop, **kept, **sizes, **FOR_EVER) as serving,
        clients(serving, 32) as slow,
        serving.client() as good,
    ):
        for number, client in enumerate(slow):
            client.send(put(key(number), bytes(nbytes))[: 186 + number])
        serving.until(puts=32)
        with Trickle(slow):
            for number in range(3):
                payload = random.Random(number).randbytes(nbytes)
                good.put(KEY, payload)
                assert good.exists(KEY)
                assert good.get(KEY) == payload
        serving.until(slots_in_use=32, open_connections=33, stalled=0, abandoned=0)


def test_room_grows_with_what_was_received(any_loop: NewLoop) -> None:
    """No more than as much again, and a payload in slots that others lie between is whole."""
    backend = DictTier()
    payloads = [random.Random(n).randbytes(MIB // 4 - n) for n in range(3)]
    with Serving(backend, any_loop, **SMALL, **FOR_EVER) as serving, clients(serving, 3) as some:
        sent = 0
        for until in (1, 4096, 4097, 20_000, 100_000, 186 + MIB // 4):
            for number, client in enumerate(some):
                client.send(put(key(number), payloads[number])[sent:until])
            sent = until
            time.sleep(0.05)
            used = serving.stats()["slots_in_use"]
            assert used <= 3 * max(1, 2 * -(-max(0, sent - 186) // 4096))
        for number, client in enumerate(some):
            assert client.get(key(number)) == payloads[number]


def test_more_uploads_than_the_buffers_hold_all_arrive(any_loop: NewLoop) -> None:
    """All of them have a part of their room when there is no more."""
    backend = DictTier()
    payloads = [random.Random(n).randbytes(MIB // 4) for n in range(24)]
    with Serving(backend, any_loop, **SMALL, **FOR_EVER) as serving, clients(serving, 24) as some:
        for half in (0, 1):
            for number, client in enumerate(some):
                request = put(key(number), payloads[number])
                client.send(request[:30_000] if half == 0 else request[30_000:])
            time.sleep(0.1)
        for number, client in enumerate(some):
            assert client.get(key(number)) == payloads[number]
        assert serving.stats()["stalled"] == 0


@pytest.mark.parametrize("how", ["writers", "readers"])
def test_who_holds_room_that_others_wait_for_has_to_go_on(how: str, any_loop: NewLoop) -> None:
    """They did send nearly everything, or ask for what is there: all buffers are taken."""
    payload = random.Random(1).randbytes(16 * MIB)
    with (
        Serving(DictTier(), any_loop, stall_timeout_s=8.0, **LARGE) as serving,
        serving.client() as good,
        clients(serving, 4) as slow,
    ):
        good.put(KEY, payload)
        assert good.exists(KEY)
        for number, client in enumerate(slow):
            if how == "readers":
                client.send(header(GET, KEY))
            else:
                client.send(put(key(number), payload)[: 16 * MIB - 1000])
        serving.until(slots_in_use=256)
        time.sleep(2.0)  # longer than is allowed to them once another client waits
        assert serving.stats()["stalled"] == 0, "while nobody waits there is time"
        good.put(key(9), payload)
        assert good.get(key(9)) == payload
        assert 1 <= serving.stats()["stalled"] <= 4


def test_the_larger_a_payload_the_more_of_it_has_to_come(any_loop: NewLoop) -> None:
    """An eighth within each time-out: so no payload is on its way for more than eight."""
    with (
        Serving(DictTier(), any_loop, stall_timeout_s=0.5, **LARGE) as serving,
        serving.client() as slow,
        contextlib.suppress(ConnectionError),
    ):
        slow.send(put(KEY, bytes(16 * MIB))[:186])
        for _ in range(40):
            slow.send(bytes(300_000))
            time.sleep(0.25)
    assert serving.stats()["stalled"] == 1


def test_the_idle_are_closed_and_only_they(any_loop: NewLoop) -> None:
    backend = DictTier()
    with (
        Serving(backend, any_loop, idle_timeout_s=2.0) as serving,
        serving.client() as silent,
        serving.client() as served,
        serving.client() as waiting,
        serving.client() as busy,
    ):
        busy.send(put(KEY, bytes(1000))[:500])
        assert served.healthy()
        backend.open.clear()
        waiting.send(header(GET, KEY))
        assert silent.ended()
        assert served.ended()
        serving.until(idle=2, open_connections=2, stalled=0)
        backend.open.set()
        assert waiting.receive(36)
        busy.send(put(KEY, bytes(1000))[500:])
        assert busy.get(KEY) == bytes(1000)


def test_a_header_that_trickles_is_cut_off(any_loop: NewLoop) -> None:
    with (
        Serving(DictTier(), any_loop, stall_timeout_s=0.5, idle_timeout_s=0) as serving,
        serving.client() as client,
    ):
        with contextlib.suppress(ConnectionError):
            for byte in header(GET, KEY):
                client.send(bytes([byte]))
                time.sleep(0.05)
        serving.until(stalled=1, open_connections=0)
