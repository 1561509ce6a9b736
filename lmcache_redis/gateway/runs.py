"""Which slots of an arena are free, as runs of neighbours.

A payload whose slots are neighbours is one buffer, of which a tier writes and reads stripes
without a copy; so one run is given wherever there is one that is long enough.
"""

from __future__ import annotations

from bisect import bisect_left


class FreeRuns:
    """All of `count` slots at first. Not thread-safe."""

    def __init__(self, count: int) -> None:
        self.free = count
        self._starts = [0] * bool(count)
        self._ends = [count] * bool(count)

    def take(self, wanted: int, after: int = 0) -> list[range]:
        """So many slots, of which there must be enough: in one run, or else in a few.

        after: the slot from which on a run is looked for first.
        """
        self.free -= wanted
        if not wanted:
            return []
        first = bisect_left(self._starts, after)
        for at in (*range(first, len(self._starts)), *range(first)):
            if self._ends[at] - self._starts[at] >= wanted:
                return [self._cut(at, wanted)]
        taken: list[range] = []
        while wanted:
            at = max(range(len(self._starts)), key=lambda n: self._ends[n] - self._starts[n])
            taken.append(self._cut(at, min(wanted, self._ends[at] - self._starts[at])))
            wanted -= len(taken[-1])
        return taken

    def give_back(self, run: range) -> None:
        """A run that was taken is free again, joined with what is free beside it."""
        self.free += len(run)
        start, end = run.start, run.stop
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == end:
            end = self._ends[at]
            del self._starts[at], self._ends[at]
        if at > 0 and self._ends[at - 1] == start:
            self._ends[at - 1] = end
            return
        self._starts.insert(at, start)
        self._ends.insert(at, end)

    def _cut(self, at: int, wanted: int) -> range:
        """The first slots of a run."""
        start = self._starts[at]
        self._starts[at] = start + wanted
        if self._starts[at] == self._ends[at]:
            del self._starts[at], self._ends[at]
        return range(start, start + wanted)
