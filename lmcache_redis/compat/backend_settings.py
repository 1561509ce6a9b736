"""Where LMCache's configuration objects say that a backend keeps chunks.

A setting is an attribute of any object. The file of seal keys, for which LMCache has no setting, is
named by the environment, as for the commands. Raises ConfigError, which names the setting and what
it may be, for one that is missing, wrong or not supported.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote

from lmcache_redis.compat.backends.storage import ChunkStorage, in_memory, in_redis, on_disk
from lmcache_redis.config import SEAL_KEY_FILE_VARIABLE
from lmcache_redis.errors import ConfigError
from lmcache_redis.resp import RedisOptions
from lmcache_redis.seal import read_seal_keys

# They keep every bit, as a backend does without them.
_EXACT_SERDES = (None, "torch", "safetensor", "fast")
_SENTINELS = "redis-sentinel://"


def memory_of(config: object, metadata: object) -> ChunkStorage:
    """Memory, with the smaller limit of the two."""
    device = _setting(config, "local_device")
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f'local_device is {device!r}: set it to "cpu" to keep chunks in memory; a directory is '
            "for LMCLocalDiskBackend"
        )
    return in_memory(min(_limit_bytes(config), _limit_bytes(metadata)))


def directory_of(config: object) -> ChunkStorage:
    """The directory of local_device, with or without file:// before it."""
    device = _setting(config, "local_device")
    directory = device.removeprefix("file://") if isinstance(device, str) else ""
    if directory in ("", "cpu", "cuda"):
        raise ConfigError(f"local_device is {device!r}: set it to a directory for this backend")
    return on_disk(directory, _limit_bytes(config))


def redis_of(config: object) -> ChunkStorage:
    """The servers of remote_url."""
    serde = _setting(config, "remote_serde")
    if serde not in _EXACT_SERDES:
        raise ConfigError(
            f'remote_serde is {serde!r}: set it to "torch", "safetensor", "fast" or None; chunks '
            "are stored as they are, neither compressed nor quantized"
        )
    return in_redis(_redis_options(_setting(config, "remote_url")))


def _redis_options(url: object) -> RedisOptions:
    if not isinstance(url, str):
        raise ConfigError(f"remote_url is {url!r}: set it to redis://HOST:PORT")
    if url.startswith("lm://"):
        raise ConfigError(
            "remote_url begins with lm://, which is for LMCache's own clients: set it to the "
            "redis:// URL of the Redis itself, for instance of the one behind the lm:// gateway"
        )
    seal_keys = read_seal_keys(os.environ.get(SEAL_KEY_FILE_VARIABLE))
    if not url.startswith(_SENTINELS):
        return RedisOptions(url, seal_keys=seal_keys)
    hosts = url.removeprefix(_SENTINELS)
    if not hosts or "/" in hosts or "?" in hosts:
        raise ConfigError(
            f"remote_url must be {_SENTINELS}HOST:PORT,HOST:PORT; for anything else write "
            "redis+sentinel://HOST:PORT,HOST:PORT/NAME"
        )
    name = quote(os.environ.get("REDIS_SERVICE_NAME", "mymaster"), safe="")
    timeout = os.environ.get("REDIS_TIMEOUT", "1")
    try:
        timeout_s = float(timeout)
    except ValueError:
        raise ConfigError(f"REDIS_TIMEOUT is {timeout!r}: set it to seconds") from None
    return RedisOptions(
        f"redis+sentinel://{hosts}/{name}",
        connect_timeout_s=timeout_s,
        op_timeout_s=timeout_s,
        seal_keys=seal_keys,
    )


def _setting(settings: object, name: str) -> Any:
    """The value of a setting. Raises ConfigError if it is missing."""
    try:
        return getattr(settings, name)
    except AttributeError:
        raise ConfigError(f"{type(settings).__name__} has no {name}, which is needed") from None


def _limit_bytes(settings: object) -> int:
    """max_local_cache_size in bytes."""
    size_gib = _setting(settings, "max_local_cache_size")
    if type(size_gib) not in (int, float) or not 0 < size_gib < 1 << 30:
        raise ConfigError(
            f"max_local_cache_size is {size_gib!r}: set it to a positive number of GiB"
        )
    return max(1, int(size_gib * (1 << 30)))


def check_device(dst_device: str) -> None:
    """Raises ConfigError, saying what to pass, unless this machine has the device."""
    import torch

    try:
        device = torch.device(dst_device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"dst_device is {dst_device!r}: {error}") from None
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise ConfigError(f'dst_device is {dst_device!r}: set it to "cpu", "cuda" or "cuda:N"')
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(
            f"dst_device is {dst_device!r}, and this machine has no CUDA device: "
            'pass dst_device="cpu"'
        )
    if device.index is not None and device.index >= count:
        raise ConfigError(
            f"dst_device is {dst_device!r}, and this machine has {count} CUDA devices"
        )
