# SPDX-License-Identifier: Apache-2.0
"""The disk tier with killed processes, full disks and directories of other users."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_redis.errors import ConfigError
from tests.cache.disk.directory import Disk, disk_use, files_in, fill, key_of, number_of, payload_of

pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[3]

PREAMBLE = """
import os, sys, threading
from pathlib import Path
from tests.cache.disk.directory import Disk, held, key_of

def put(disk, number, size):
    return disk.put(key_of(number), number.to_bytes(8, "big") * (size // 8))

directory = Path(sys.argv[1])
"""


def start(code: str, directory: Path, *before: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", PREAMBLE + textwrap.dedent(code), str(directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(code: str, directory: Path, *before: str) -> str:
    process = start(code, directory, *before)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


@pytest.mark.parametrize("delay_s", [0.02, 0.1, 0.3])
def test_a_process_killed_while_it_writes_leaves_whole_chunks(
    directory: Path, delay_s: float
) -> None:
    limit_bytes = 4 << 20
    process = start(
        f"""
        tier = Disk(directory, {limit_bytes})

        def work(seed):
            number = seed
            while True:
                put(tier, number % 40, 8 * (1 + number * 977 % 30_000))
                number += 4

        for seed in range(4):
            threading.Thread(target=work, args=(seed,)).start()
        print("ready", flush=True)
        """,
        directory,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    # Writes were in flight. The process's end released the lock.
    assert disk_use(directory) <= limit_bytes
    tier = Disk(directory, limit_bytes)
    found = tier.list()
    assert found
    assert len(files_in(directory)) == len(found)
    for key in found:
        raw = tier.get(key)
        assert raw is not None
        assert raw == number_of(key).to_bytes(8, "big") * (len(raw) // 8)
    assert tier.used_bytes == disk_use(directory) <= limit_bytes
    tier.close()


FILLS_A_DISK = """
    stored = [put(tier, number, 64 << 10) for number in range(100)]
    assert not all(stored), "the disk was never full"
    assert any(stored)
    assert held(tier) == [number for number, was in enumerate(stored) if was]
    for number, was in enumerate(stored):
        assert tier.get(key_of(number)) == (number.to_bytes(8, "big") * 8192 if was else None)
    names = [name for _, _, names in os.walk(directory) for name in names]
    assert len(names) == 1 + sum(stored), "nothing of the others was left"
    # With room again, it goes on.
    for number in range(3):
        assert tier.remove(key_of(number))
    assert put(tier, 200, 64 << 10)
    tier.close()
    print("ok")
"""


def test_a_full_disk_stores_nothing_more(directory: Path) -> None:
    """ENOSPC from a file system of 1 MiB in the process's mount namespace."""
    directory.mkdir()
    unshare = ["unshare", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=1m,mode=700 none {directory}"
    try:
        possible = subprocess.run([*unshare, mount], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare")
    if possible.returncode:
        pytest.skip("no file system can be mounted here")
    code = "tier = Disk(directory, 1 << 30)" + FILLS_A_DISK.replace("\n    ", "\n")
    ran = subprocess.run(
        [*unshare, f'{mount} && exec "$0" "$@"', sys.executable, "-c", PREAMBLE + code, directory],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "ok\n"
    warnings = [line for line in ran.stderr.splitlines() if "No space left" in line]
    assert len(warnings) == 1, ran.stderr


def test_a_file_that_may_not_grow_is_not_stored(directory: Path) -> None:
    """EFBIG after a partial write, from a limit of the process."""
    output = output_of(
        """
        import resource
        tier = Disk(directory, 1 << 30)
        assert put(tier, 1, 1 << 20)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, resource.RLIM_INFINITY))
        assert not put(tier, 1, 1 << 20)
        assert not put(tier, 2, 1 << 20)
        assert put(tier, 4, 1 << 18)
        assert held(tier) == [1, 4]
        names = [name for _, _, names in os.walk(directory) for name in names]
        assert len(names) == 3, names
        print("ok")
        """,
        directory,
    )
    assert output == "ok\n"


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that another user may enter, because those of pytest are private."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        for parent in path.parents:
            if not parent.stat().st_mode & 0o001:
                pytest.skip(f"another user may not enter {parent}")
        yield path


def test_a_directory_that_may_not_be_written(open_to_all: Path) -> None:
    """As a user who is subject to modes: a put returns False, the start raises ConfigError."""
    directory = open_to_all / "tier"
    directory.mkdir()
    if os.getuid() == 0:
        os.chown(directory, 65534, 65534)
    output = output_of(
        """
        from lmcache_redis.errors import ConfigError
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        tier = Disk(directory, 1 << 30)
        assert put(tier, 1, 800)
        for where, _, _ in os.walk(directory):
            os.chmod(where, 0o500)
        assert not put(tier, 1, 1600)
        assert not put(tier, 2, 800)
        assert tier.get(key_of(1)) is not None
        tier.close()
        try:
            Disk(directory / "below", 1 << 30)
        except ConfigError as error:
            assert "writable" in str(error)
            print("ok")
        for where, _, _ in os.walk(directory):
            os.chmod(where, 0o700)
        """,
        directory,
    )
    assert output == "ok\n"


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("theirs")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be used"):
            Disk(path, 1 << 20)


def test_a_second_tier_is_refused(open_tier: Callable[..., Disk], directory: Path) -> None:
    tier = open_tier()
    fill(tier, [1])
    with pytest.raises(ConfigError, match="in use"):
        open_tier()
    code = """
    from lmcache_redis.errors import ConfigError
    try:
        Disk(directory, 1 << 20)
        print("opened")
    except ConfigError as error:
        print("refused", "in use" in str(error))
    """
    assert output_of(code, directory) == "refused True\n"
    assert tier.get(key_of(1)) == payload_of(1, 100)
    tier.close()
    assert output_of(code, directory) == "opened\n"
    assert open_tier().list() == [key_of(1)]
