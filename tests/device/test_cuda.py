"""`CudaDevice` over the driver of the tests, with an engine in another process: every byte."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_redis.device import driver
from lmcache_redis.device.gpu import Gpus
from tests import cuda_driver
from tests.device.gpu_calls import Host, View, check_on_gpu, plain
from tests.device.gpu_engine import PIECE_BYTES, GpuEngine
from tests.device.layouts import Call, Paged, calls

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(bool(cuda_driver.missing()), reason=str(cuda_driver.missing())),
]
DIRECT, BY_KERNEL = 1, 1 << 40  # Gpus.direct_copy_bytes


@pytest.fixture(scope="module", params=["one allocation", "pieces"])
def engine(request: pytest.FixtureRequest) -> Iterator[GpuEngine]:
    pieces = 1 if request.param == "pieces" else None
    started = GpuEngine(PIECE_BYTES, pieces, cuda_driver.environment())
    yield started
    started.kill()


@pytest.fixture
def memory(engine: GpuEngine) -> Iterator[tuple[View, Host]]:
    """The engine's, and the host's: two pinned pieces, and one that is not."""
    cuda_driver.reset()
    view, host = View(engine), Host(64 << 10, 3, 2)
    yield view, host
    host.close()
    view.close()
    assert cuda_driver.get("refusals") == 0
    left = cuda_driver.counts()
    assert set(left) <= {"contexts", "modules"}, left
    cuda_driver.reset()


each_way = pytest.mark.parametrize("direct_copy_bytes", [DIRECT, BY_KERNEL])
each_driver = pytest.mark.parametrize("batch", [True, False])


def without_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "has", lambda name: name != "cuMemcpyBatchAsync")


@each_way
@each_driver
def test_both_directions(
    engine: GpuEngine,
    memory: tuple[View, Host],
    direct_copy_bytes: int,
    batch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any layout, page size, alignment, stripes, skipped blocks, number of chunks."""
    if not batch:
        without_batch(monkeypatch)
    view, host = memory
    gpus = Gpus(1, direct_copy_bytes, host.pieces_of)
    cuda_driver.set("delay_us", 50)

    @settings(max_examples=60)
    @given(
        st.sampled_from([1, 2, 4, 8, 16]).flatmap(lambda granule: calls(granule, "cuda")),
        st.sampled_from([0, 0, 1, 8]),
        st.sampled_from([0, 0, 1, 16, 300]),
    )
    def check(call: Call, shift: int, gap: int) -> None:
        call.stripe_payload_bytes = max(call.stripe_payload_bytes, call.chunk_bytes // 64)
        check_on_gpu(engine, view, host, gpus, call, shift=shift, gap=gap)

    check()


def large_call(chunks: int) -> Call:
    layout = plain(8192, 8, 2)
    case = Paged(layout, [np.random.default_rng(1).integers(0, 256, 8 * 2 * 8192, np.uint8)])
    blocks = 4 // chunks
    ids = [[n * blocks + at for at in range(blocks)] for n in range(chunks)]
    return Call(case, ids, 8192, 0)


@each_way
@pytest.mark.parametrize(("gap", "submissions"), [(0, 2), (64, 1)])
def test_a_call_is_one_submission(
    engine: GpuEngine, memory: tuple[View, Host], direct_copy_bytes: int, gap: int, submissions: int
) -> None:
    """Neighbours are merged; what is left is one batch."""
    view, host = memory
    gpus = Gpus(1, direct_copy_bytes, host.pieces_of)
    names = ("cuMemcpyBatchAsync", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2")
    before = {name: cuda_driver.get(f"{name}.called") for name in names}
    check_on_gpu(engine, view, host, gpus, large_call(1), shift=0, gap=gap)
    done = {name: cuda_driver.get(f"{name}.called") - before[name] for name in names}
    assert done["cuMemcpyBatchAsync"] <= 2
