# SPDX-License-Identifier: Apache-2.0
"""Peers that name memory of others, take back their memory, or send too much."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from lmcache_redis import messages as m
from lmcache_redis import native, transport
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.device.context import export_kv_caches
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.processes import process_start_time
from tests.agent.starts import Starts
from tests.harness import WAIT_S, AgentServer, Engine, block_hashes, wait_until

HASHES = block_hashes("prompt", 8)
NOBODY = 65534


@pytest.fixture
def foreign() -> Iterator[int]:
    """A process that belongs to another user."""
    if os.geteuid() != 0:
        yield 1
        return
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=NOBODY) as process:
        yield process.pid


def registration_of(engine: Engine, **changes: Any) -> m.RegisterKVCache:
    """The registration of the engine's worker, with other handles."""
    exported = export_kv_caches([engine.caches[0]], engine.num_blocks)
    (pages,) = exported.groups
    layout = KVLayout(
        (("rank", "0"),), "float32", "cpu", engine.block_size_tokens, engine.num_blocks,
        pages.segments, pages.page_format,
    )  # fmt: skip
    storages = tuple(msgspec.structs.replace(each, **changes) for each in exported.storages)
    kv_rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    return m.RegisterKVCache(0, (m.KVGroup(kv_rank, layout, layout.fingerprint(64)),), storages)


def ask(engine: Engine, question: m.RegisterKVCache) -> m.Answer:
    fields = {name: getattr(question, name) for name in question.__struct_fields__[1:]}
    answers: list[m.Answer] = []

    def answered() -> bool:
        """False if the agent was silent until the link declared it dead."""
        call = engine.workers[0].link.submit(type(question), **fields)
        call.wait(WAIT_S)
        if call.answer is not None:
            answers.append(call.answer)
        return bool(answers)

    wait_until(answered, what="an answer")
    return answers[0]


def test_a_process_of_another_user_is_refused(
    agent: AgentServer, engine: Engine, foreign: int
) -> None:
    assert isinstance(ask(engine, registration_of(engine)), m.Done)
    start = process_start_time(foreign)
    answer = ask(engine, registration_of(engine, pid=foreign, pid_start_time=start))
    assert isinstance(answer, m.Failure)
    assert answer.code == m.REFUSED
    assert f"process {foreign} runs as user" in answer.reason
    assert "as one user" in answer.reason
    # The earlier registration stays: the refused message changes nothing.
    engine.store("r", HASHES, range(8))
    assert engine.lookup("r", HASHES) == 128


@contextmanager
def truncated(engine: Engine) -> Iterator[None]:
    """The engine's memory is gone; its tensors must not be touched meanwhile."""
    storage = {t.untyped_storage()._cdata: t.untyped_storage() for t in engine.caches[0].values()}
    sizes = dict(each._share_fd_cpu_() for each in storage.values())
    for fd in sizes:
        os.ftruncate(fd, 0)
    try:
        yield
    finally:
        for fd, size_bytes in sizes.items():
            os.ftruncate(fd, size_bytes)


def test_truncated_memory_costs_its_own_copies_alone(start: Starts, agent: AgentServer) -> None:
    engine = start.engine(agent)
    other = start.engine(agent)
    engine.store("r0", HASHES, range(8))
    with truncated(engine):
        engine.store("r1", block_hashes("other", 8), range(8))
        assert agent.counter("drop_device_error") == 2
        assert engine.lookup("r2", HASHES) == 128
        assert engine.retrieve("r2", HASHES, range(8)) == set(range(8))
        assert agent.counter("retrieves_failed") == 1
    assert "Traceback" not in agent.log
    other.randomize(range(8))
    other.store("r3", block_hashes("third", 8), range(8))
    assert other.lookup("r4", block_hashes("third", 8)) == 128
    assert other.retrieve("r4", block_hashes("third", 8), range(20, 28)) == set()
    for tensor in other.caches[0].values():
        assert torch.equal(tensor[:8], tensor[20:28])


@pytest.mark.skipif(native.guard is None, reason="the native extension is missing")
def test_memory_that_goes_under_copies_does_not_end_the_agent(
    start: Starts, agent: AgentServer
) -> None:
    engine = start.engine(agent, layers=24, width=512)
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            with truncated(engine):
                pass

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        # Until it has gone while a copy was in progress, or for so many copies.
        for number in range(100):
            hashes = block_hashes(f"prompt {number}", 8)
            engine.store(f"r{number}", hashes, range(8))
            if agent.counter("drop_device_error"):
                break
    finally:
        over.set()
        thread.join()
    assert agent.running


@contextmanager
def dealer_at(agent: AgentServer) -> Iterator[zmq.Socket[bytes]]:
    """A socket to the agent that sends messages without any limit."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(agent.endpoint)
    try:
        yield dealer
    finally:
        dealer.disable_monitor()
        context.destroy(linger=0)


def say(dealer: zmq.Socket[bytes], question: m.Message) -> m.Answer:
    dealer.send_multipart(transport.encode(question))
    assert dealer.poll(int(WAIT_S * 1000))
    return transport.decode_answer(dealer.recv_multipart())


def peak_bytes(agent: AgentServer) -> int:
    """The agent's peak memory."""
    status = Path(f"/proc/{agent.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def test_a_frame_that_is_too_large_is_not_received(agent: AgentServer, engine: Engine) -> None:
    engine.store("r0", HASHES, range(8))
    before = peak_bytes(agent)
    with dealer_at(agent) as dealer:
        assert isinstance(say(dealer, m.Ping(1)), m.Pong)
        events = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.send_multipart([m.PREAMBLE, bytes(512 << 20)], copy=False)
        assert events.poll(int(WAIT_S * 1000)), "the agent closes the connection"
    assert engine.lookup("r1", HASHES) == 128
    assert engine.retrieve("r1", HASHES, range(20, 28)) == set()
    assert peak_bytes(agent) - before < 128 << 20


def test_a_message_of_the_largest_size_is_received(agent: AgentServer) -> None:
    with dealer_at(agent) as dealer:
        dealer.send_multipart([m.PREAMBLE, bytes(m.MAX_MESSAGE_BYTES)])
        assert dealer.poll(int(WAIT_S * 1000))
        answer = transport.decode_answer(dealer.recv_multipart())
        assert isinstance(answer, m.Failure)
        assert answer.code == m.BAD_MESSAGE


def test_names_are_bounded_and_their_sender_is_told(agent: AgentServer) -> None:
    long = "x" * 1025
    with dealer_at(agent) as dealer:
        for hello in (m.Hello(7, long, "m", 1, None, "1"), m.Hello(7, "e", long, 1, None, "1")):
            answer = say(dealer, hello)
            assert isinstance(answer, m.Failure)
            assert (answer.call_id, answer.code) == (7, m.BAD_MESSAGE)
        assert isinstance(say(dealer, m.Hello(8, "e", "m", 1, None, "1")), m.Welcome)
        answer = say(dealer, m.Lookup(9, long, (b"h",)))
        assert isinstance(answer, m.Failure)
        assert answer.call_id == 9
        assert "1024" in answer.reason


def test_peers_are_bounded(start: Starts) -> None:
    """Peers that are gone without GOODBYE count until the agent's timeout."""
    constants = {"lmcache_redis.agent.service.HEARTBEAT_TIMEOUT_S": 600}
    agent = start.agent(constants=constants)
    for number in range(m.MAX_PEERS):
        with dealer_at(agent) as dealer:
            hello = m.Hello(1, f"engine {number}", "m", 1, None, "1")
            assert isinstance(say(dealer, hello), m.Welcome)
    with dealer_at(agent) as dealer:
        answer = say(dealer, m.Hello(1, "one more", "m", 1, None, "1"))
        assert isinstance(answer, m.Failure)
        assert answer.code == m.REFUSED
        assert isinstance(say(dealer, m.Ping(2)), m.Pong)


def test_garbage_on_the_wire_harms_no_one_else(agent: AgentServer, engine: Engine) -> None:
    engine.store("r0", HASHES, range(8))
    with dealer_at(agent) as dealer:
        for frames in (
            [b""],
            [b"x", b"y", b"z"],
            [m.PREAMBLE, b""],
            [m.PREAMBLE, os.urandom(100)],
            [m.PREAMBLE, b"\xdd\xff\xff\xff\xff"],
            transport.encode(m.EndSession(7, request_id="stranger")),
            transport.encode(m.Ping(7)),
        ):
            dealer.send_multipart(frames)
        answers = []
        for _ in range(7):
            assert dealer.poll(int(WAIT_S * 1000))
            answers.append(transport.decode_answer(dealer.recv_multipart()))
    assert all(isinstance(answer, m.Failure) for answer in answers[:-1])
    assert answers[-2].code == m.UNKNOWN_PEER
    assert isinstance(answers[-1], m.Pong)
    assert engine.lookup("r1", HASHES) == 128
