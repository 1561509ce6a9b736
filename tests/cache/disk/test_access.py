# SPDX-License-Identifier: Apache-2.0
"""The disk tier's directory belongs to its user only, and no link in it is followed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_redis.cache.disk.files import LOCK_NAME, lock_directory
from lmcache_redis.errors import ConfigError
from tests.cache.disk.directory import Disk, files_in, fill, held, key_of, payload_of

PAYLOAD = payload_of(1, 100)


@pytest.mark.parametrize(
    ("mode", "advice"),
    [
        (0o770, "chmod go-w .*tier`"),
        (0o702, "chmod go-w .*tier`"),
        (0o1777, "use a directory below it"),  # such as /tmp, which everybody needs as it is
    ],
)
def test_a_directory_that_others_may_write_into_is_refused(
    open_tier: Callable[..., Disk], directory: Path, mode: int, advice: str
) -> None:
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match=rf"{advice}, or choose another"):
        open_tier()
    assert list(directory.iterdir()) == []
    directory.chmod(mode & 0o755)
    open_tier()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_directory_of_another_user_is_refused(
    open_tier: Callable[..., Disk], directory: Path, tmp_path: Path, through_a_link: bool
) -> None:
    if through_a_link:  # to a directory of ours that is not for chunks
        (tmp_path / "ours").mkdir()
        directory.symlink_to(tmp_path / "ours")
    else:
        directory.mkdir()
    os.chown(directory, 65534, -1, follow_symlinks=False)
    with pytest.raises(ConfigError, match="belongs to another user, or choose another"):
        open_tier()


def test_a_link_of_ours_to_a_directory_of_ours_is_fine(
    open_tier: Callable[..., Disk], directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "large").mkdir()
    directory.symlink_to(tmp_path / "large")
    fill(open_tier(), [1])
    assert len(files_in(tmp_path / "large")) == 1


def test_the_lock_is_no_link(
    open_tier: Callable[..., Disk], directory: Path, tmp_path: Path
) -> None:
    directory.mkdir()
    (directory / LOCK_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be used for chunks"):
        open_tier()
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_became_a_link_is_not_read(
    open_tier: Callable[..., Disk], directory: Path, tmp_path: Path
) -> None:
    tier = open_tier()
    fill(tier, [1])
    (path,) = files_in(directory)
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    assert tier.get(key_of(1)) is None
    assert tier.remove(key_of(1))
    assert not path.is_symlink()
    assert moved.exists(), "the link was removed, not where it led"


def test_a_folder_that_became_a_link_is_not_followed(
    open_tier: Callable[..., Disk], directory: Path, tmp_path: Path
) -> None:
    tier = open_tier()
    fill(tier, [1])
    (path,) = files_in(directory)
    moved = path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(moved)
    assert tier.get(key_of(1)) is None
    assert not tier.put(key_of(1), PAYLOAD)
    tier.remove(key_of(1))
    assert [each.name for each in moved.iterdir()] == [path.name]
    tier.close()
    tier = open_tier()
    assert held(tier) == []
    assert not tier.put(key_of(1), PAYLOAD)
    assert [each.name for each in moved.iterdir()] == [path.name]
    path.parent.unlink()
    assert tier.put(key_of(1), PAYLOAD)
    assert tier.get(key_of(1)) == PAYLOAD


def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    """A path that was mistyped: nothing is written there."""
    (tmp_path / "passwd").touch()
    with pytest.raises(ConfigError, match="such as passwd: choose one that is empty"):
        lock_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["passwd"]


def test_a_new_file_system_is_no_ones(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    os.close(lock_directory(tmp_path))
    os.close(lock_directory(tmp_path))
