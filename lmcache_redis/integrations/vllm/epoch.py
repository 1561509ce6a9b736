# SPDX-License-Identifier: Apache-2.0
"""Epochs: they separate the KV of old weights from the KV of new weights.

The name of every chunk begins with its engine's epoch: docs/internals/identity.md. `engine` notices
what begins one. An engine whose parameters are those of an earlier epoch again returns to it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable

from lmcache_redis.integrations.vllm.parameters import Parameters

EPOCH_BYTES = 8
# States of memory that an epoch is remembered by.
_MOST_KNOWN = 64


def named_epoch(weights_id: str | None) -> bytes:
    """The epoch of a ``weights_id``; the shared one for None."""
    return b"" if weights_id is None else _digest(weights_id, b"lmcr2.epoch")


def version_epoch(run: str, version: str) -> bytes:
    """The epoch of a weight version, which is unique within a training run."""
    return _digest(json.dumps([run, version]), b"lmcr2.run")


def _digest(text: str, person: bytes) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=EPOCH_BYTES, person=person).digest()


class Epochs:
    """The epoch of an engine, and the parameters in memory that it stands for.

    Each method whose name says what has happened returns whether the epoch is another one now
    (`EpochChange`).

    weights_id: names the first epoch; None for the shared one.
    run: the operator's name for the training run; None: versions of weights are not shared.
    parameters: reads the parameters in memory; None if that is not possible.
    """

    def __init__(
        self, weights_id: str | None, run: str | None, parameters: Callable[[], Parameters | None]
    ) -> None:
        self.current = named_epoch(weights_id)
        self.is_own = False  # random, and so not shared with other engines
        self.is_used = False  # a request's chunks have been named with it
        self.is_earlier = False  # the engine has returned to it
        self._run = run
        self._read = parameters
        self._left: dict[bytes, None] = {}  # own epochs that were used, and have chunks
        # By everything in memory, the epoch that stands for it, and whether it is an own one.
        self._known: dict[bytes, tuple[bytes, bool]] = {}
        self._parameters: Parameters | None = None  # None: not known
        self._remember(parameters())

    def begin_own(self) -> bool:
        """Begins an epoch that no other engine has; no earlier one comes back."""
        self._known.clear()
        self._begin(os.urandom(EPOCH_BYTES), own=True)
        self._remember(self._parameters)
        return True

    def weights_may_differ(self) -> bool:
        """The weights may have changed, and have no name."""
        self._parameters = None
        # One update may take hundreds of calls: an own epoch without a request is kept.
        return (self.is_used or not self.is_own) and self._begin(os.urandom(EPOCH_BYTES), own=True)

    def weights_were_loaded(self) -> bool:
        """An update has ended: the weights in memory may be those of an earlier epoch."""
        return self._settle(self._read())

    def weights_have_id(self, weights_id: str) -> bool:
        """The operator has named the weights in memory."""
        return self._named(named_epoch(weights_id))

    def weights_have_version(self, version: str) -> bool:
        """The caller of vLLM has named the weights in memory. Another run may use that name."""
        if self._run is None:
            return self._settle(self._read())
        return self._named(version_epoch(self._run, version))

    def check_parameters(self) -> bool:
        """Compares the parameters in memory with those that the epoch stands for."""
        before, found = self._parameters, self._read()
        if before is not None and found is not None and found.weights == before.weights:
            self._remember(found)
            return False
        return self._settle(found)

    def check_unknown(self) -> bool:
        """As `check_parameters`, if it is not known what is in memory."""
        return self._parameters is None and self._settle(self._read())

    def take_ended(self) -> list[bytes]:
        """Own epochs that were used and will not come back. Each is returned once."""
        if self._parameters is not None:
            for everything, (epoch, own) in list(self._known.items()):
                if own and epoch != self.current:
                    del self._known[everything]
        kept = {self.current, *(epoch for epoch, _ in self._known.values())}
        ended = [epoch for epoch in self._left if epoch not in kept]
        for epoch in ended:
            del self._left[epoch]
        return ended

    def _settle(self, found: Parameters | None) -> bool:
        """What is in memory now: it returns to the epoch that stands for it, if there is one."""
        known = None
        if found is not None and found.everything is not None:
            known = self._known.get(found.everything)
        if known is None:
            changed = self.weights_may_differ()
        else:
            changed = self.is_earlier = self._begin(known[0], own=known[1])
        self._remember(found)
        return changed

    def _named(self, epoch: bytes) -> bool:
        changed = self._begin(epoch, own=False)
        self._remember(self._read())
        return changed

    def _remember(self, found: Parameters | None) -> None:
        """The current epoch stands for what is in memory."""
        self._parameters = found
        if found is not None and found.everything is not None:
            self._known.pop(found.everything, None)
            self._known[found.everything] = self.current, self.is_own
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]

    def _begin(self, epoch: bytes, *, own: bool) -> bool:
        if epoch == self.current:
            return False
        if self.is_own and self.is_used:
            self._left[self.current] = None
        self.current, self.is_own = epoch, own
        self.is_used = epoch in self._left
        self.is_earlier = False
        return True


# A method of `Epochs`.
EpochChange = Callable[[Epochs], bool]
