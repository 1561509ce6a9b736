# SPDX-License-Identifier: Apache-2.0
"""Finds the config.json of a model by what `vllm serve` takes. Nothing is downloaded.

That is a directory, or the name of a repository, whose files lie in the cache of huggingface_hub
(its page "Understand caching"), which need not be installed:

    HF_HUB_CACHE/models--ORG--NAME/refs/REVISION                 the name of a commit
    HF_HUB_CACHE/models--ORG--NAME/snapshots/COMMIT/config.json
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from lmcache_redis.errors import ConfigError

_CONFIG_NAME = "config.json"
_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def find_model(model: str, revision: str = "main") -> tuple[dict[str, Any], str]:
    """The config of a model, and its name.

    model: a directory, its config.json, or a repository. revision: of that, a branch, a tag or a
    commit. Raises ConfigError.
    """
    path = Path(model)
    if os.path.isdir(path):  # Path.is_dir raises where this user may not look
        return _read(path / _CONFIG_NAME, model), path.resolve().name
    if _REPOSITORY.fullmatch(model) and not os.path.lexists(path):
        return _read(_in_hub_cache(model, revision) / _CONFIG_NAME, model), model
    return _read(path, model), path.resolve().parent.name


def _read(path: Path, model: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{model} cannot be read ({error.strerror}: {path}): name the directory of a model, "
            "or its config.json. Nothing is downloaded"
        ) from None
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not the config of a model, which is a JSON object")
    return config


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it downloads, by the variables that it reads."""
    named = os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE"))
    if named is None:
        above = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        named = os.path.join(os.environ.get("HF_HOME", os.path.join(above, "huggingface")), "hub")
    return Path(os.path.expandvars(os.path.expanduser(named)))


def _in_hub_cache(model: str, revision: str) -> Path:
    """The directory with the files of a repository. Raises ConfigError."""
    cache = hub_cache()
    repository = cache / f"models--{model.replace('/', '--')}"
    commits = repository / "snapshots"
    try:
        # Without the file, the revision is a commit, or not there.
        reference = repository / "refs" / revision
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
        found = sorted(each.name for each in commits.iterdir())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{model} is no directory here, and the Hugging Face cache {cache} does not have it "
            f"({why}): start vLLM with it once, set HF_HOME as for vLLM, or name the model's "
            "directory. Nothing is downloaded"
        ) from None
    if commit not in found:
        raise ConfigError(
            f"{repository} does not have the revision {revision!r}: give --revision, one of "
            f"{', '.join(found) or 'none'}. Nothing is downloaded"
        )
    return commits / commit
