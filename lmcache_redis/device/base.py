"""What the agent needs of a worker's device memory, whatever the device is.

Life cycle: a worker registers handles and a layout; the agent opens a `DeviceContext`, which
maps the memory once and checks the layout against its size; gathers and scatters run on the
agent's copy threads, several at a time, one chunk a call or, where chunks are small and a call
is dear, several; `close` waits for the calls in progress and unmaps. After the engine has died a
context still works on CPU memory (the mapping keeps it) and fails with DeviceError on CUDA memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lmcache_redis.device.layout import KVLayout


class DeviceContext(Protocol):
    """One worker's paged KV cache, mapped. Every method may raise DeviceError.

    A call moves ``chunks`` chunks of equally many blocks: ``block_ids`` has those of the first in
    token order, then those of the second; ``slots`` likewise. Slots are writable memoryviews of
    bytes, one a stripe, at least as long as their stripe's payload; they and the blocks belong to
    the call until it returns. Arguments are checked before the first byte moves: a call that
    raises for a bound has changed nothing.

    ``until_ns`` (``time.monotonic_ns()``) is when the engine may give the blocks to somebody else.
    A call that cannot begin with them before, because it waits for its turn or for the engine's
    event, raises and has not touched them. On the CPU a call looks again before each MiB: one that
    gets late raises as well, and has copied a part.
    """

    @property
    def layout(self) -> KVLayout: ...

    @property
    def call_bytes(self) -> int:
        """What a call should move at least, as many whole chunks as that takes; 0: one chunk."""
        ...

    @property
    def on_host_cores(self) -> bool:
        """Whether the engine computes on the cores that the agent copies and sends with."""
        ...

    def gather(
        self,
        block_ids: Sequence[int],
        slots: Sequence[memoryview],
        stripe_payload_bytes: int,
        event: bytes | None = None,
        read: Callable[[], None] | None = None,
        until_ns: int | None = None,
        chunks: int = 1,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        """Copy the chunks in ``block_ids`` out of the device into ``slots``.

        Returns when the slots hold them. ``read`` is called, once, on the same thread, when the
        blocks have been read, where that is well before: on a GPU. From then on they may be
        anything; the slots belong to the call until it returns.

        ``filled`` is called after that, on the same thread, never or several times, each time
        with more: how many of the slots, from the first on, hold their bytes already. A call may
        fail all the same, with the others. That all are filled is said by the return alone.

        ``event`` is the engine's interprocess event after which the blocks may be read;
        None where the engine's memory is coherent already, as on the CPU.
        """
        ...

    def scatter(
        self,
        block_ids: Sequence[int],
        slots: Sequence[memoryview],
        stripe_payload_bytes: int,
        skip_blocks: int = 0,
        event: bytes | None = None,
        until_ns: int | None = None,
        chunks: int = 1,
    ) -> None:
        """Copy the chunks in ``slots`` into ``block_ids``, but for the first ``skip_blocks``.

        ``skip_blocks`` counts from the first block of the first chunk.

        ``event`` as for `gather`: after it the blocks may be written (an engine on a GPU may
        still have the zeroing of fresh blocks in flight). On return the engine may read them.
        """
        ...

    def close(self) -> None:
        """Wait for calls in progress, then unmap. Later calls raise DeviceError. Idempotent."""
        ...
