"""A digest of the parameters that a worker computes with, read from its memory.

A trainer in the engine's own process writes weights without any call that a connector could see
(``model.load_weights``, as TRL does it), and then resets vLLM's prefix cache. So at each reset the
digests of all ranks are compared with those before (`Engine.parameters`). Every bit counts: an
optimizer step with a small learning rate changes few elements of a bfloat16 model.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_WORD_BYTES = 8
_WORDS_AT_ONCE = 1 << 21  # the sum on a device takes five times 16 MiB of its memory
_MULTIPLIER = 6364136223846793005  # odd, so that no bit is lost
_SEED = 0x6C6D6372


def parameters_digest(worker: Any) -> bytes:
    """The digest of a worker's parameters and buffers, of its draft model too.

    Runs in the worker, by ``collective_rpc``. Raises if the worker has no model of torch.
    """
    runner = worker.model_runner
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    models = [runner.get_model(), getattr(drafter, "model", None)]
    digest = hashlib.blake2b(digest_size=16)
    on_devices: list[torch.Tensor] = []
    factors: dict[torch.device, torch.Tensor] = {}
    for model in models:
        if not isinstance(model, torch.nn.Module):
            continue
        for name, tensor in _tensors_of(model):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            if tensor.device.type == "cpu":
                digest.update(xxhash.xxh3_128_digest(_bytes_of(tensor).numpy()))
            else:
                if tensor.device not in factors:
                    factors[tensor.device] = odd_numbers(_WORDS_AT_ONCE).to(tensor.device)
                on_devices.append(weighted_sum(tensor, factors[tensor.device]))
    if on_devices:  # read back together: each read waits for the device
        digest.update(struct.pack(f"{len(on_devices)}q", *torch.stack(on_devices).tolist()))
    return digest.digest()


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
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        yield from _plain(name, tensor)


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that hold a tensor's bytes: some kinds of weights wrap several."""
    partitions = getattr(tensor, "partitions", None)
    if isinstance(partitions, Mapping):  # vLLM's SharedWeightParameter
        for index, inner in partitions.items():
            yield from _plain(f"{name}.{index}", inner)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{attribute}", getattr(tensor, attribute))
    elif tensor.numel() and not tensor.is_meta:
        yield name, tensor
