"""A digest of one weights file that reads only a small part of it.

The table of a file locates its tensors (safetensors, GGUF, the zip files of ``torch.save``). The
digest covers the whole table, with names, shapes and the CRCs of a zip file, and the first, the
middle and the last bytes of every tensor. Large tensors have more, evenly spread samples: training
changes every tensor, and almost every number in it. A file without a valid table is sampled more
densely. A small file is read whole.

Tables are untrusted: every offset is checked against the file's size.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import zipfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

_WHOLE_BYTES = 4 << 20
_SAMPLE_BYTES = 4096
_SAMPLE_EVERY_BYTES = 8 << 20  # of a tensor, besides the three samples of each
_UNKNOWN_EVERY_BYTES = 1 << 18  # of a file without a table
_MAX_HEADER_BYTES = 1 << 30

# Bytes of GGUF's metadata types by number; 8 is a string, 9 an array.
_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_STRING, _GGUF_ARRAY, _GGUF_UINT32 = 8, 9, 4
_ZIP_LOCAL_HEADER = struct.Struct("<4s22xHH")


class Extent(NamedTuple):
    """``size`` bytes of a file from ``offset`` on."""

    offset: int
    size: int


class _Table(NamedTuple):
    """A file's description of itself (``facts``, and the bytes of ``whole``), and its tensors."""

    facts: bytes
    whole: Extent
    tensors: Sequence[Extent]


class _NoTable(Exception):
    """The file has another format, or an invalid table."""


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
        for part in _parts(file, size_bytes):
            digest.update(part if isinstance(part, bytes) else _read(file, part))
        return digest.digest()


def _parts(file: BinaryIO, size_bytes: int) -> Iterator[bytes | Extent]:
    """What the digest covers, in this order: bytes, and extents of the file."""
    whole_file = Extent(0, size_bytes)
    if size_bytes <= _WHOLE_BYTES:
        yield whole_file
        return
    try:
        table = _table(file, size_bytes)
    except _NoTable:
        yield from _spread(whole_file, 2 + size_bytes // _UNKNOWN_EVERY_BYTES)
        return
    yield struct.pack("<Q", len(table.facts)) + table.facts
    yield table.whole
    for tensor in table.tensors:
        yield from _spread(tensor, 3 + 2 * (tensor.size // (2 * _SAMPLE_EVERY_BYTES)))


def _open_nonblocking(path: str, flags: int) -> int:
    """An opener that does not wait for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read(file: BinaryIO, extent: Extent) -> bytes:
    """The bytes of ``extent``. Raises OSError if the file has become shorter."""
    parts = []
    offset, left = extent
    while left:
        part = os.pread(file.fileno(), left, offset)
        if not part:
            raise OSError(f"{file.name} became shorter while it was read")
        parts.append(part)
        offset, left = offset + len(part), left - len(part)
    return b"".join(parts)


def _spread(extent: Extent, count: int) -> Iterator[Extent]:
    """``count`` evenly spread samples, or the whole extent if it is not larger than these."""
    if extent.size <= count * _SAMPLE_BYTES:
        yield extent
        return
    for number in range(count):
        at = (extent.size - _SAMPLE_BYTES) * number // (count - 1)
        yield Extent(extent.offset + at, _SAMPLE_BYTES)


def _table(file: BinaryIO, size_bytes: int) -> _Table:
    magic = _read(file, Extent(0, 4))
    if magic == b"GGUF":
        return _Gguf(file, size_bytes).table()
    if magic[:2] == b"PK":
        return _zip_table(file, size_bytes)
    return _safetensors_table(file, size_bytes)


def _within(extent: Extent, size_bytes: int) -> Extent:
    if extent.offset < 0 or extent.size < 0 or extent.offset + extent.size > size_bytes:
        raise _NoTable
    return extent


def _safetensors_table(file: BinaryIO, size_bytes: int) -> _Table:
    """https://huggingface.co/docs/safetensors: header length, JSON header, data."""
    header_bytes = struct.unpack("<Q", _read(file, Extent(0, 8)))[0]
    if header_bytes > min(size_bytes - 8, _MAX_HEADER_BYTES):
        raise _NoTable
    whole = Extent(0, 8 + header_bytes)
    try:
        header = json.loads(_read(file, whole)[8:])
        spans = sorted(
            (begin, end)
            for name, tensor in header.items()
            if name != "__metadata__"
            for begin, end in [map(int, tensor["data_offsets"])]
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _NoTable from error
    ends = [0, *(end for _, end in spans)]
    if [*(begin for begin, _ in spans), size_bytes - whole.size] != ends:
        raise _NoTable  # the format allows no gaps
    tensors = [_within(Extent(whole.size + a, b - a), size_bytes) for a, b in spans]
    return _Table(b"", whole, tensors)


def _zip_table(file: BinaryIO, size_bytes: int) -> _Table:
    """The central directory has a CRC of every member, and so covers every tensor.

    Samples are read too, because ``torch.save`` may leave CRCs out.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise _NoTable from error
    facts = bytearray()
    tensors = []
    for member in members:
        facts += f"{member.filename}\0{member.CRC}\0{member.file_size}\0".encode(
            errors="surrogateescape"
        )
        header = _within(Extent(member.header_offset, _ZIP_LOCAL_HEADER.size), size_bytes)
        magic, name_bytes, extra_bytes = _ZIP_LOCAL_HEADER.unpack(_read(file, header))
        if magic != b"PK\3\4":
            raise _NoTable
        begin = header.offset + header.size + name_bytes + extra_bytes
        tensors.append(_within(Extent(begin, member.compress_size), size_bytes))
    return _Table(bytes(facts), Extent(0, 0), tensors)


class _Gguf:
    """https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.

    Only the offsets of tensors are used: each tensor ends where the next begins, so the sizes of
    quantization types are not needed.
    """

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._alignment = 32

    def table(self) -> _Table:
        self._file.seek(4)
        version, tensors, pairs = self._unpack("<IQQ")
        if version not in (2, 3) or max(tensors, pairs) > self._size_bytes:
            raise _NoTable
        for _ in range(pairs):
            self._metadata()
        begins = [0]
        for _ in range(tensors):
            self._string()
            (dimensions,) = self._unpack("<I")
            self._skip(8 * dimensions + 4)
            begins.append(self._unpack("<Q")[0])
        header_bytes = self._file.tell()
        data = -(-header_bytes // self._alignment) * self._alignment
        begins.sort()
        extents = [
            _within(Extent(data + begin, end - begin), self._size_bytes)
            for begin, end in pairwise([*begins, self._size_bytes - data])
        ]
        return _Table(b"", Extent(0, header_bytes), extents)

    def _metadata(self) -> None:
        name = self._string()
        (kind,) = self._unpack("<I")
        if name == b"general.alignment" and kind == _GGUF_UINT32:
            self._alignment = max(1, self._unpack("<I")[0])
        elif kind == _GGUF_ARRAY:
            self._skip_values(*self._unpack("<IQ"))
        else:
            self._skip_values(kind, 1)

    def _skip_values(self, kind: int, count: int) -> None:
        if kind == _GGUF_STRING:
            for _ in range(count):
                self._string()
        elif kind in _GGUF_SIZES:
            self._skip(count * _GGUF_SIZES[kind])
        else:
            raise _NoTable

    def _string(self) -> bytes:
        (length,) = self._unpack("<Q")
        if length > 256:
            self._skip(length)
            return b""
        return self._take(length)

    def _unpack(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, count: int) -> bytes:
        found = self._file.read(count)
        if len(found) != count:
            raise _NoTable
        return found

    def _skip(self, count: int) -> None:
        if count > self._size_bytes - self._file.tell():
            raise _NoTable
        self._file.seek(count, os.SEEK_CUR)
