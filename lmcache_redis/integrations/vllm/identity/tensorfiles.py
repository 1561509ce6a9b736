"""A digest of one weights file that reads only a small part of it.

The table of a safetensors file says where its tensors begin. The digest covers the whole table, and
the first, the middle and the last bytes of every tensor, because a fine-tune may change norms or
biases only. Large tensors have more, evenly spread samples: training changes almost every number. A
small file, and one of another format, is read whole.

Tables are untrusted: every offset is checked against the file's size.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import xxhash

_WHOLE_BYTES = 4 << 20
_SAMPLE_BYTES = 4096
_SAMPLE_EVERY_BYTES = 8 << 20  # of a tensor, besides the three samples of each
_MAX_HEADER_BYTES = 1 << 30


# What a header that is none, or none that can be believed, raises.
_BAD_TABLE = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


def digest_file(path: Path) -> bytes:
    """A digest of 16 bytes, over the parts of the file that the module's docstring names.

    Raises OSError if the file cannot be read or is not a regular file.
    """
    with open(path, "rb", opener=_open_nonblocking) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        size_bytes = status.st_size
        digest = hashlib.blake2b(struct.pack("<Q", size_bytes), digest_size=16)
        if size_bytes <= _WHOLE_BYTES:
            digest.update(_read(file, 0, size_bytes))
        elif (table := _table(file, size_bytes)) is None:
            whole = xxhash.xxh3_128()
            for offset in range(0, size_bytes, _WHOLE_BYTES):
                whole.update(_read(file, offset, min(_WHOLE_BYTES, size_bytes - offset)))
            digest.update(whole.digest())
        else:
            header, begins = table
            digest.update(struct.pack("<Q", len(header)) + header)
            for begin, end in pairwise(sorted([*begins, size_bytes])):
                for offset, size in _samples(begin, end - begin):
                    digest.update(_read(file, offset, size))
        return digest.digest()


def _open_nonblocking(path: str, flags: int) -> int:
    """An opener that does not wait for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    found = file.read(size)
    if len(found) != size:
        raise OSError(f"{file.name} became shorter while it was read")
    return found


def _samples(offset: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the samples of a tensor are, and how long: all of it, if it is not longer than they."""
    count = 3 + 2 * (size // (2 * _SAMPLE_EVERY_BYTES))
    if size <= count * _SAMPLE_BYTES:
        yield offset, size
        return
    for number in range(count):
        yield offset + (size - _SAMPLE_BYTES) * number // (count - 1), _SAMPLE_BYTES


def _table(file: BinaryIO, size_bytes: int) -> tuple[bytes, list[int]] | None:
    """A file's header, and where its tensors begin. Each ends where the next begins.

    None if the file has another format, or an invalid table.
    Source: https://huggingface.co/docs/safetensors: header length, JSON header, data.
    """
    header_bytes = struct.unpack("<Q", _read(file, 0, 8))[0]
    if header_bytes > min(size_bytes - 8, _MAX_HEADER_BYTES):
        return None
    header = _read(file, 0, 8 + header_bytes)
    try:
        begins = [
            len(header) + int(tensor["data_offsets"][0])
            for name, tensor in json.loads(header[8:]).items()
            if name != "__metadata__"
        ]
    except _BAD_TABLE:
        return None
    return (header, begins) if begins and 0 <= min(begins) <= max(begins) <= size_bytes else None
