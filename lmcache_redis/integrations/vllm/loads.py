"""The loads that vLLM waits for.

They are recorded apart from `ConnectorScheduler` and `ConnectorWorker`, so that they are reported
even after one of these has failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class EndedLoads(NamedTuple):
    """Requests whose loads have ended for vLLM, and the blocks of each that were not filled."""

    requests: set[str]
    failed: dict[str, set[int]]


class AwaitedLoads:
    """In the scheduler: not yet sent to the workers. In a worker: not yet reported to vLLM."""

    def __init__(self) -> None:
        self._block_ids: dict[str, Sequence[int]] = {}
        self._failed_blocks: set[int] = set()

    def expect(self, loads: Mapping[str, Sequence[int]]) -> None:
        """vLLM waits for these loads, and the block ids of each."""
        self._block_ids.update(loads)

    def forget(self, request_id: str) -> None:
        """The load is on its way, or reported."""
        self._block_ids.pop(request_id, None)

    def take_lost(self) -> dict[str, Sequence[int]]:
        """The loads that will not be reported otherwise."""
        lost, self._block_ids = self._block_ids, {}
        return lost

    def all_failed(self) -> EndedLoads:
        """Reports all of them as failed."""
        lost = self.take_lost()
        return EndedLoads(set(lost), {r: set(block_ids) for r, block_ids in lost.items()})

    def add_failed(self, ended: EndedLoads) -> None:
        """For vLLM versions that ask for blocks."""
        self._failed_blocks.update(*ended.failed.values())

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed
