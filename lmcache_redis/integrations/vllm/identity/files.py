# SPDX-License-Identifier: Apache-2.0
"""Files are named by what vLLM has read of them.

vLLM reads a model when an engine starts, and the identity is made minutes later. What lies there by
then may be another model: a deployment has replaced the files, and memory has the old ones. So each
process of an engine looks at the files before vLLM reads them (`making`), and a file that is
another one when the identity is made is not known (`require_unchanged`).

A file is the same if size, mtime and ctime are (some file systems have new inodes after a while).
Clocks are not compared: that of a network file system may be wrong by minutes. What is changed in
place twice within one tick of the file system's clock (4 ms for ext4), once before the look and
once after it, is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from lmcache_redis.errors import Unsupported

# Size, mtime and ctime.
FileState = tuple[int, int, int]

# What was seen before vLLM read it: by file or directory, the states of its files. Of a process.
_seen: dict[Path, Mapping[Path, FileState]] = {}


def saw(root: Path, files: Iterable[Path]) -> None:
    """vLLM has not read ``files`` yet, which are those of ``root``; none: it is not there."""
    _seen[root] = {}
    with suppress(OSError):  # it may read what is not seen
        _seen[root] = {path: _state(path) for path in files}


def was_seen(root: Path) -> bool:
    return root in _seen


def require_unchanged(root: Path, files: Iterable[Path]) -> None:
    """``files`` are now those of ``root``. Raises Unsupported if they are not what was seen."""
    if root not in _seen:
        return
    seen, now = _seen[root], {path: _state(path) for path in files}
    changed = [path for path in {**seen, **now} if seen.get(path) != now.get(path)]
    if changed:
        raise Unsupported(
            f"{changed[0]} has changed since this engine started, so that what it has in memory "
            "is not known"
        )


def _state(path: Path) -> FileState:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
