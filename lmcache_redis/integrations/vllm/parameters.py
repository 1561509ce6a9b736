# SPDX-License-Identifier: Apache-2.0
"""Digests of the parameters that a worker computes with, read from its memory.

A trainer in the engine's own process writes weights without any call that a connector could see
(``model.load_weights``, as TRL does it), and then resets vLLM's prefix cache. So at each reset the
digests of all ranks are compared with those before (`Engine.parameters`). Every bit counts: an
optimizer step with a small learning rate changes few elements of a bfloat16 model. The digest of
128 MiB takes 11 ms on two CPU cores.

weights      parameters and buffers, and what vLLM has packed and keeps elsewhere
everything   also other tensors of the modules, which vLLM derives from weights when it loads them:
             a trainer that only writes weights leaves them as they were

Left out is what computing changes: KV caches, buffers for indices, the history of scales that
follow the images seen (fp8 attention of encoders), and tables of rotary embeddings, which the first
step converts to the type of its queries (gpt-oss) or makes of parameters (FoPE).

vLLM packs the linear layers of a CPU in memory that cannot be read: `watch_packing` has a digest
made when it packs them. Layers that are offloaded by prefetching have staging buffers in place of
parameters: what is read is the memory that these are filled from.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lmcache_redis.integrations.vllm import needs

_WORD_BYTES = 8
_WORDS_AT_ONCE = 1 << 21  # the sum on a device takes five times 16 MiB of its memory
_MULTIPLIER = 6364136223846793005  # odd, so that no bit is lost
_SEED = 0x6C6D6372

# vLLM's names of tensors that computing changes.
_CHANGING = re.compile(r"kv_cache|_fp8_[qkv]_amax|.*_(buffer|counter)|cos_sin_cache")
# These follow the history beside them, if there is one: vLLM's `MMEncoderAttention`.
_FOLLOWS = re.compile(r"_fp8_([qkv])_scale")
# Offloaders whose parameters are the weights themselves, wherever they lie.
_IN_PLACE = ("NoopOffloader", "UVAOffloader")
_PACKED_DIGEST = "lmcache_redis_digest"
# Parameters that are empty or None once their bytes are packed elsewhere.
_WEIGHT = re.compile(r"(.*_)?weight(_packed)?")


class Parameters(NamedTuple):
    """What is in memory. everything: None if not all of it can be read."""

    weights: bytes
    everything: bytes | None

    @staticmethod
    def of_ranks(ranks: Sequence[Parameters]) -> Parameters:
        everything = [each.everything for each in ranks]
        known = [each for each in everything if each is not None]
        return Parameters(
            _joined([each.weights for each in ranks]),
            _joined(known) if len(known) == len(everything) else None,
        )


# Of an operator who says that weights change by vLLM's own calls alone: never another at a reset,
# and never known to be those of an earlier epoch.
UNREAD = Parameters(b"", None)


def parameters_digest(worker: Any) -> tuple[bytes, bytes | None]:
    """The fields of `Parameters` of one worker, of its draft model too.

    Runs in the worker, by ``collective_rpc``. Raises if the worker has no model of torch, or the
    weights are where we do not know.
    """
    runner = needs.MODEL_RUNNER.of(worker)
    drafter = needs.DRAFTER.of(runner) or needs.SPECULATOR.of(runner)
    models = [needs.GET_MODEL.of(runner)(), needs.DRAFTED_MODEL.of(drafter)]
    staged = _staged()
    factors: dict[torch.device, torch.Tensor] = {}
    weights, others, is_whole = _Digests(factors), _Digests(factors), not staged
    for model in models:
        if not isinstance(model, torch.nn.Module):
            continue
        # In the order of their names: a reload makes some of them again.
        for name, tensor in sorted(_tensors_of(model), key=lambda each: each[0]):
            # A staging buffer may have other bytes than what it is filled from: `is_whole`.
            is_whole &= not tensor.is_meta
            weights.add(name, staged.get(id(tensor), tensor))
        for path, module in model.named_modules():
            for name, packed in _packed_in(module):
                is_whole &= packed is not None
                weights.add(f"{path}.{name}", packed)
            for name, value in sorted(vars(module).items()):
                if isinstance(value, torch.Tensor) and not _CHANGING.fullmatch(name):
                    others.add(f"{path}.{name}", value)
    found = weights.digest()
    return found, _joined([found, others.digest()]) if is_whole else None


def watch_packing(ops: Any) -> None:
    """From now on, what ``ops`` (``vllm._custom_ops``) packs has a digest of what was packed."""
    for each in needs.PACKERS:
        if each.is_in(ops):
            each.wrap_once(ops, _packed)


def _packed(pack: Any, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    packed = pack(weight, *args, **kwargs)
    rows = weight.t() if weight.t().is_contiguous() else weight
    digests = _Digests()
    for each in (rows, *args, *kwargs.values()):
        if isinstance(each, torch.Tensor):
            digests.add("", each)
    setattr(packed, _PACKED_DIGEST, digests.digest())
    return packed


class _Digests:
    """A digest of named tensors, and of digests. Sums on devices are read back together."""

    def __init__(self, factors: dict[torch.device, torch.Tensor] | None = None) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._factors = {} if factors is None else factors
        self._sums: list[torch.Tensor] = []

    def add(self, name: str, value: torch.Tensor | bytes | None) -> None:
        self._digest.update(f"{name} ".encode())
        if isinstance(value, bytes):
            self._digest.update(value)
        elif value is not None:
            for inner, tensor in _plain(name, value):
                self._digest.update(f"{inner} {tensor.dtype} {tuple(tensor.shape)}".encode())
                if tensor.device.type == "cpu":
                    self._digest.update(xxhash.xxh3_128_digest(_bytes_of(tensor).numpy()))
                else:
                    if tensor.device not in self._factors:
                        self._factors[tensor.device] = odd_numbers(_WORDS_AT_ONCE).to(tensor.device)
                    self._sums.append(weighted_sum(tensor, self._factors[tensor.device]))

    def digest(self) -> bytes:
        if self._sums:  # each read waits for the device
            sums = torch.stack([each.to(self._sums[0].device) for each in self._sums]).tolist()
            self._digest.update(struct.pack(f"{len(sums)}q", *sums))
        return self._digest.digest()


def _joined(digests: Sequence[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(digests), digest_size=16).digest()


def odd_numbers(count: int) -> torch.Tensor:
    """The factors of `weighted_sum`, the same in every process."""
    generator = torch.Generator().manual_seed(_SEED)
    some = torch.randint(-(1 << 62), 1 << 62, (count,), dtype=torch.int64, generator=generator)
    return some * 2 + 1


def weighted_sum(tensor: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """A 64-bit sum over a tensor's bytes, as a scalar on its device; odd: of `odd_numbers`, there.

    Each word is mixed, without loss, and multiplied by an odd number of its own, modulo 2**64. So
    no change of one word is lost, and changes of several cancel each other only by chance.
    """
    data = _bytes_of(tensor)
    rest = -len(data) % _WORD_BYTES
    if rest or data.storage_offset() % _WORD_BYTES:
        data = torch.nn.functional.pad(data, (0, rest)).clone()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in data.view(torch.int64).split(len(odd)):
        mixed = part * _MULTIPLIER
        # Down with the high bits: products move none of them there.
        mixed ^= (mixed >> 32).bitwise_and_(0xFFFF_FFFF)
        total = total * _MULTIPLIER + mixed.mul_(odd[: len(part)]).sum()
    return total


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    names = {name for name, _ in model.named_buffers()}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        path, _, last = name.rpartition(".")
        follows = _FOLLOWS.fullmatch(last)
        history = f"_fp8_{follows[1]}_amax" if follows else ""
        if name in names and (
            _CHANGING.fullmatch(last)
            or (history and (f"{path}.{history}" if path else history) in names)
        ):
            continue
        yield name, tensor


def _packed_in(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | bytes | None]]:
    """What holds weights in place of a module's parameters; None if it cannot be read.

    On a CPU vLLM takes the weight away from a linear layer, and gives it a function that has it.
    """
    cells = getattr(needs.CPU_LINEAR.of(module), "__closure__", None) or ()
    found: list[torch.Tensor | bytes | None] = []
    for held in (cell.cell_contents for cell in cells):
        if isinstance(held, torch.Tensor):
            found.append(held)
        elif not isinstance(held, (int, float, str, type(None))):
            found.append(getattr(held, _PACKED_DIGEST, None))
    is_removed = any(
        _WEIGHT.fullmatch(name) and (each is None or not each.numel())
        for name, each in module._parameters.items()
    )
    if is_removed and not found:
        found.append(None)
    for number, each in enumerate(found):
        yield f"packed {number}", each


def _staged() -> dict[int, torch.Tensor]:
    """By the id of a parameter that is a staging buffer, the memory that this is filled from.

    Raises AttributeError if vLLM offloads weights in a way that we do not know.
    """
    if (get_offloader := needs.GET_OFFLOADER.load()) is None:
        return {}
    offloader: Any = get_offloader()
    if type(offloader).__name__ in _IN_PLACE:
        return {}
    return {
        id(needs.STAGED_PARAM.of(part)): needs.STAGED_FROM.of(part)
        for each in needs.MODULE_OFFLOADERS.of(offloader)
        for part in needs.PARAM_OFFLOADERS.of(each).values()
    }


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that hold a tensor's bytes: some kinds of weights wrap several."""
    partitions = needs.PARTITIONS.of(tensor)
    if isinstance(partitions, Mapping):  # vLLM's SharedWeightParameter
        for index, inner in partitions.items():
            yield from _plain(f"{name}.{index}", inner)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{attribute}", getattr(tensor, attribute))
    elif tensor.numel() and not tensor.is_meta:
        yield name, tensor
