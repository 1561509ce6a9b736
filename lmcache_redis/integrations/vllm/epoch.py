"""Epochs: they separate the KV of old weights from the KV of new weights.

The name of every chunk begins with its engine's epoch: docs/internals/identity.md. `engine` notices
what begins one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable

EPOCH_BYTES = 8


def named_epoch(weights_id: str | None) -> bytes:
    """The epoch of a ``weights_id``; the shared one for None."""
    return b"" if weights_id is None else _digest(weights_id, b"lmcr1.epoch")


def version_epoch(run: str, version: str) -> bytes:
    """The epoch of a weight version, which is unique within a training run."""
    return _digest(json.dumps([run, version]), b"lmcr1.run")


def _digest(text: str, person: bytes) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=EPOCH_BYTES, person=person).digest()


class Epochs:
    """The epoch of an engine, and the parameters in memory that it stands for.

    Each method returns whether the epoch is another one now (`EpochChange`).

    weights_id: names the first epoch; None for the shared one.
    run: the operator's name for the training run; None: versions of weights are not shared.
    parameters: reads the digest of the parameters in memory; None if that is not possible.
    """

    def __init__(
        self, weights_id: str | None, run: str | None, parameters: Callable[[], bytes | None]
    ) -> None:
        self.current = named_epoch(weights_id)
        self.is_own = False  # random, and so not shared with other engines
        self.is_used = False  # a request's chunks have been named with it
        self._run = run
        self._read_parameters = parameters
        self._parameters = parameters()

    def begin_own(self) -> bool:
        """Begins an epoch that no other engine has."""
        return self._begin(os.urandom(EPOCH_BYTES), own=True)

    def weights_may_differ(self) -> bool:
        """The weights may have changed, and have no name."""
        self._parameters = None
        # One update may take hundreds of calls: an own epoch without a request is kept.
        return (self.is_used or not self.is_own) and self.begin_own()

    def weights_have_id(self, weights_id: str) -> bool:
        """The operator has named the weights in memory."""
        return self._named(named_epoch(weights_id))

    def weights_have_version(self, version: str) -> bool:
        """The caller of vLLM has named the weights in memory, perhaps as another run does."""
        if self._run is None:
            return self.weights_may_differ()
        return self._named(version_epoch(self._run, version))

    def check_parameters(self) -> bool:
        """Compares the parameters in memory with those that the epoch stands for."""
        before, found = self._parameters, self._read_parameters()
        is_another = (found is None or found != before) and self.weights_may_differ()
        self._parameters = found
        return is_another

    def _named(self, epoch: bytes) -> bool:
        self._parameters = self._read_parameters()
        return self._begin(epoch, own=False)

    def _begin(self, epoch: bytes, *, own: bool) -> bool:
        if epoch == self.current:
            return False
        self.current, self.is_own, self.is_used = epoch, own, False
        return True


# A method of `Epochs`.
EpochChange = Callable[[Epochs], bool]
