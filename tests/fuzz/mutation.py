# SPDX-License-Identifier: Apache-2.0
"""Bytes made wrong on purpose: seeded, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

# Numbers at which decoders go wrong, as text; binary fields get them by `number`.
INTERESTING = (-2, -1, 0, 1, 2, 127, 255, 256, 511, 512, 513, 1 << 16, (1 << 31) - 1, 1 << 32)
LARGE = ((1 << 40) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 10**19, 10**25)


class Mutator:
    """Spoils good inputs. tokens: what the format is made of, put in at random places."""

    def __init__(self, seed: int, good: Sequence[bytes], tokens: Sequence[bytes]) -> None:
        self._random = random.Random(seed)
        self._good = good
        self._tokens = tokens
        self._changes: tuple[Callable[[bytes], bytes], ...] = (
            self._flip,
            self._set,
            self._insert,
            self._delete,
            self._repeat,
            self._splice,
            self._truncate,
            self._renumber,
        )

    def below(self, limit: int) -> int:
        """Any of 0 to limit - 1. (randrange takes four times as long.)"""
        return int(self._random.random() * limit)

    def pick(self, choices: Sequence[bytes]) -> bytes:
        return choices[self.below(len(choices))]

    def next(self) -> bytes:
        """One of ten is good as it is, one is noise, the others have up to four changes."""
        kind = self.below(20)
        if kind == 0:
            return self._random.randbytes(self.below(64))
        if kind == 1:
            return b"".join([self.pick(self._tokens) for _ in range(self.below(12))])
        data = self.pick(self._good)
        if kind > 3:
            for _ in range(1 + self.below(4)):
                data = self._changes[self.below(len(self._changes))](data)
        return data

    def pieces(self, data: bytes) -> list[bytes]:
        """The same bytes, as a socket might bring them."""
        edges = sorted(self.below(len(data) + 1) for _ in range(self.below(4)))
        return [data[a:b] for a, b in zip([0, *edges], [*edges, len(data)], strict=True)]

    def number(self, nbytes: int) -> bytes:
        """A little-endian field of so many bytes, often at the edge of something."""
        if self.below(3) == 0:
            return self._random.randbytes(nbytes)
        numbers = INTERESTING + LARGE
        value = numbers[self.below(len(numbers))]
        return (value % (1 << 8 * nbytes)).to_bytes(nbytes, "little")

    # --------------------------------------------------------------- changes

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return data
        at = self.below(len(data))
        return data[:at] + bytes((data[at] ^ 1 << self.below(8),)) + data[at + 1 :]

    def _set(self, data: bytes) -> bytes:
        if not data:
            return data
        at = self.below(len(data))
        return data[:at] + bytes((self.below(256),)) + data[at + 1 :]

    def _insert(self, data: bytes) -> bytes:
        at = self.below(len(data) + 1)
        return data[:at] + self.pick(self._tokens) + data[at:]

    def _delete(self, data: bytes) -> bytes:
        at = self.below(len(data) + 1)
        return data[:at] + data[at + 1 + self.below(8) :]

    def _repeat(self, data: bytes) -> bytes:
        at = self.below(len(data) + 1)
        end = at + self.below(32)
        return data[:end] + data[at:end] + data[end:]

    def _splice(self, data: bytes) -> bytes:
        other = self.pick(self._good)
        return data[: self.below(len(data) + 1)] + other[self.below(len(other) + 1) :]

    def _truncate(self, data: bytes) -> bytes:
        return data[: self.below(len(data) + 1)]

    def _renumber(self, data: bytes) -> bytes:
        """Another number in place of the digits that come next."""
        at = self.below(len(data) + 1)
        while at < len(data) and not 0x30 <= data[at] <= 0x39:
            at += 1
        end = at
        while end < len(data) and 0x30 <= data[end] <= 0x39:
            end += 1
        numbers = INTERESTING + LARGE
        return data[:at] + b"%d" % numbers[self.below(len(numbers))] + data[end:]
