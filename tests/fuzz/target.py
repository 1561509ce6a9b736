# SPDX-License-Identifier: Apache-2.0
"""What a target of the fuzzer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.mutation import Mutator

ACCEPTED = "accepted"


@dataclass(frozen=True)
class Target:
    """make: an input from a mutator. run: decodes it, and checks what came out."""

    name: str
    good: tuple[bytes, ...]
    tokens: tuple[bytes, ...]
    make: Callable[[Mutator], bytes]
    run: Callable[[bytes, Mutator], str]
