# SPDX-License-Identifier: Apache-2.0
"""What a worker of a stock LMCache 0.5.6 does with blocks that a server still copies.

After one unanswered ping the client reports every load in flight as failed, vLLM frees the blocks,
and nothing tells the server: messages carry no lease. The next request's block had parts of another
prompt's KV in 3 of 4 runs when the server was stopped inside a copy and continued, and in 2 of 2
when the engine was paused for 1.2 s of a load. With the unpacked wheel of LMCache on PYTHONPATH:

    python tests/compat/mp_evidence.py CASE [HEARTBEAT_S]

CASE: frozen, paused-load, paused-store, paused-submit, dead-shm or dead-pickle.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import shared_memory

import torch
import zmq

BLOCKS, TOKENS, WIDTH = 8, 16, 64
OURS, CACHED, OTHER = 1.0, 7.0, 5.0  # KV: of the request, in the cache, of the blocks' next request


def serve(url: str, case: str, client: int, interval: float) -> None:
    from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextResponse
    from lmcache.v1.multiprocess.rpc import get_rpc_spec
    from lmcache.v1.multiprocess.transport.zmq_impl.mq import (
        msgspec_encode,
        unwrap_request_payloads,
    )
    from lmcache.v1.multiprocess.transport.zmq_impl.wire import decode_operation

    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(url)
    caches, late, done = [], [], []
    shm = shared_memory.SharedMemory(create=True, size=1 << 20)
    pool = (f"/{shm.name}", shm.size) if case == "dead-shm" else ("", 0)

    def copy(frames, op, block, lease_s) -> None:
        if case == "frozen":
            caches[0][:, block, :8] = CACHED  # in the middle of the copy,
            if time.monotonic() < lease_s:  # with a lease that was checked just now,
                os.kill(os.getpid(), signal.SIGSTOP)  # the server is stopped
            caches[0][:, block, 8:] = CACHED
        else:
            time.sleep(0.3 if case == "paused-submit" else 2 * interval + 0.5)  # Redis, or a queue
            if op == "retrieve":
                caches[0][:, block] = CACHED
            else:
                print(
                    f"server: the store of KV {OURS} has read KV "
                    f"{caches[0][0, block].flatten()[0].item()}, and it is time to publish it",
                    flush=True,
                )
        done.append([*frames, msgspec_encode((b"", True), get_rpc_spec(op).response_type)])

    while True:
        while done:
            router.send_multipart(done.pop())
        if not router.poll(10):
            continue
        peer, uid, b_op, *args = router.recv_multipart()
        op, began = decode_operation(b_op), time.monotonic()
        spec = get_rpc_spec(op)
        args = unwrap_request_payloads(args, spec.payload_types)
        if op == "ping" and case.startswith("paused") and late:
            late.clear()
            os.kill(client, signal.SIGSTOP)  # the engine's process is paused, not the server
            threading.Timer(interval + 0.2, os.kill, (client, signal.SIGCONT)).start()
        if op == "register_kv_cache":
            caches[:] = [each.to_tensor() for each in args[1]]
        if op in ("prepare_store", "prepare_retrieve"):
            shm.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if op in ("store", "retrieve"):
            late.append(op)
            threading.Thread(
                target=copy, args=([peer, uid, b_op], op, args[2][0][0], began + 5)
            ).start()
            continue
        answer = {
            "get_chunk_size": TOKENS,
            "get_experimental": [],
            "ping": True,
            "register_kv_cache_engine_driven_context": RegisterEngineDrivenContextResponse(*pool),
        }.get(op)
        router.send_multipart([peer, uid, b_op, msgspec_encode(answer, spec.response_type)])
        if (took := time.monotonic() - began) > 0.05:
            print(f"server: {op} answered after {took:.3f} s")


def main(case: str, interval: float) -> None:
    from lmcache.integration.vllm.vllm_multi_process_adapter import (
        LMCacheMPWorkerAdapter,
        LoadStoreOp,
        ParallelStrategy,
    )

    url = f"ipc:///tmp/lmcmp-{os.getpid()}"
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", url, case, str(os.getpid()), str(interval)]
    )
    one = ParallelStrategy(False, 1, 0, 1, 1, 1)
    worker = LMCacheMPWorkerAdapter(
        url,
        zmq.Context.instance(),
        "model",
        TOKENS,
        one,
        extra_config={
            "lmcache.mp.heartbeat_interval": interval,
            "lmcache.mp.mq_timeout": 5.0 if case.startswith("dead") else 60.0,
            "lmcache.mp.mp_transfer_mode": "engine_driven"
            if case.startswith("dead")
            else "lmcache_driven",
        },
    )
    shape = (2, BLOCKS, TOKENS, 1, WIDTH)
    kv = {"layer.0": torch.full(shape, OURS), "layer.1": torch.full(shape, OURS)}
    worker.register_kv_caches(kv, layout_hints={"kv_layout": "NHD"})
    cache = kv["layer.0"]
    op = LoadStoreOp(token_ids=list(range(TOKENS)), block_ids=[[3]], start=0, end=TOKENS)
    event = worker.create_recorded_event()
    began = time.monotonic()
    if case.startswith("dead"):
        for submit in (worker.submit_store_request, worker.submit_retrieve_request):
            began = time.monotonic()
            try:
                submit("request", op, event)
                how = "returned"
            except Exception as error:
                how = f"raised {type(error).__name__}: {error},"
            print(f"client: {submit.__name__} {how} after {time.monotonic() - began:.1f} s")
            if how != "returned":
                break
        sys.stdout.flush()
        os._exit(0)
    submit = (
        worker.submit_store_request if case == "paused-store" else worker.submit_retrieve_request
    )
    if case == "paused-submit":  # the load begins when the pause ends
        worker.submit_retrieve_request(
            "first", LoadStoreOp(list(range(TOKENS)), [[1]], 0, TOKENS), event
        )
        now = time.monotonic()
        while now + interval > (now := time.monotonic()):
            time.sleep(0)
        worker.get_finished(set())
        began = time.monotonic()
    submit("request", op, event)
    stores, loads = set(), set()
    while "request" not in stores | loads:
        time.sleep(0.01)
        stores, loads = worker.get_finished({"request"} if case == "paused-store" else set())
    print(
        f"client: after {time.monotonic() - began:.1f} s get_finished says stores {stores}, "
        f"loads {loads}; failed blocks {worker.get_block_ids_with_load_errors()}"
    )
    cache[:, 3] = OTHER  # vLLM frees the block, and gives it to another request
    os.kill(server.pid, signal.SIGCONT)
    time.sleep(2 if case == "frozen" else 2 * interval + 1)
    found = sorted(set(cache[:, 3].flatten().tolist()))
    print(f"client: block 3 of the next request should have KV [{OTHER}], and has {found}")
    server.kill()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    else:
        main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 1.0)
