# SPDX-License-Identifier: Apache-2.0
"""What the scheduler knows of requests: their options, names and lookups."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from lmcache_redis import tenants
from lmcache_redis.integrations.vllm import needs
from lmcache_redis.integrations.vllm.epoch import Epochs
from lmcache_redis.integrations.vllm.identity.lora import AdapterDigests
from lmcache_redis.integrations.vllm.worker import Planned

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.lmcache_redis")

# What vLLM's hashers of media return: blake3 and sha256, or sha512.
_DIGEST, _LONG_DIGEST = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{128}")


@dataclass(frozen=True)
class CachePolicy:
    """What an engine may do with the cache."""

    hash_tokens: int  # that one hash of vLLM covers
    loads: bool = True
    stores: bool = True
    load_always: bool = False  # also what is computed faster
    adapters_only: bool = False  # prompts without an adapter are not cached
    beside_others: bool = False  # others of a MultiConnector may bring a prompt
    first_compared: int = 0  # hits at the start that are only compared


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request asks of the cache: ``kv_transfer_params={"lmcache_redis": {...}}``.

    load, store: whether its prefix may be loaded, and its KV stored. max_load_tokens: the end of
    the prefix that may be loaded; None: no limit. tenant: whose request it is; what `of` returns
    has it as agents are sent it (`tenants`). stored_tokens: leading tokens that another engine has
    stored just now, so that they are waited for; if it is not given, none, or all if the request
    has ``do_remote_prefill``, as proxies set it for any connector.
    """

    load: bool = True
    store: bool = True
    max_load_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    tenant: Any = ""  # a bad one must not void the others
    stored_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None

    @staticmethod
    def of(request: Request, policy: CachePolicy, names: TenantNames) -> RequestOptions:
        """What is done for a request. Options that make no sense are logged and not followed."""
        params = request.kv_transfer_params
        given = params if isinstance(params, Mapping) else {}
        found, options = given.get("lmcache_redis"), RequestOptions()
        try:
            options = options if found is None else msgspec.convert(found, RequestOptions)
        except (msgspec.ValidationError, UnicodeError) as error:
            logger.warning(
                "request %s: kv_transfer_params with lmcache_redis=%r are not followed: %s; give "
                "some of load (bool), store (bool), max_load_tokens (int), stored_tokens (int) and "
                "tenant (str)",
                request.request_id, found, error,
            )  # fmt: skip
        # Another connector brings its whole prompt; a hit would replace that by a part of it.
        is_prefilled = bool(given.get("do_remote_prefill"))
        is_brought = policy.beside_others and is_prefilled
        waits_for_all = is_prefilled and options.stored_tokens is None
        is_cached = not policy.adapters_only or request.lora_request is not None
        return msgspec.structs.replace(
            options,
            load=options.load and policy.loads and is_cached and not is_brought,
            store=options.store and policy.stores and is_cached,
            stored_tokens=sys.maxsize if waits_for_all else options.stored_tokens,
            # Nor must others void it: its limit would not hold.
            tenant=names.of(request, found.get("tenant") if isinstance(found, Mapping) else None),
        )


def is_prefill(request: Request) -> bool:
    """Whether another engine is to decode it. Proxies say so, for any connector."""
    params = request.kv_transfer_params
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


class TenantNames:
    """Whose requests they are. Bad names are ignored, and each kind of them is logged once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def of(self, request: Request, name: Any) -> str:
        """The tenant of a request that gives this name (None: no name); empty: it has no tenant."""
        if name is not None and name != "":
            fault = tenants.fault_of(name)
            if not fault:
                return str(name)
            if fault not in self._logged:
                self._logged.add(fault)
                logger.warning(
                    "request %s: the tenant %.80r is ignored: %s; write at most %d printable "
                    "characters, without commas and without blanks at the ends, not `none`, "
                    "`other` or `*`, and no # first (others like it are not logged)",
                    request.request_id, name, fault, tenants.MOST_LETTERS,
                )  # fmt: skip
        return tenants.of_salt(needs.CACHE_SALT.of(request) or "")


@dataclass(slots=True)
class RequestLookup:
    """The lookup of a request, from its question until it is forgotten.

    first_chunk: where it began. asked_s: when, until it is answered (`time.monotonic()`).
    local_tokens: computed locally when it was answered. canary_chunks: leading chunks to be
    compared; None: not decided. asked_again: vLLM was told to ask once more, because what it has of
    the prefix was not known. held_back: what it has found is not loaded. load_began_s: when blocks
    were allocated for its load. loaded: the tokens of this load, by tier.
    """

    first_chunk: int
    asked_s: float | None
    local_tokens: int = 0
    canary_chunks: int | None = None
    held_back: bool = False
    asked_again: bool = False
    load_began_s: float = 0.0
    loaded: Mapping[str, int] = field(default_factory=dict)

    def tokens_by_tier(
        self, tiers: Sequence[str], load_tokens: int, chunk_tokens: int
    ) -> dict[str, int]:
        """How many tokens of a load come from each tier. tiers: of chunks from the first one on."""
        found: dict[str, int] = {}
        end = self.local_tokens + load_tokens
        for chunk, tier in enumerate(tiers, start=self.first_chunk):
            first, stop = chunk * chunk_tokens, (chunk + 1) * chunk_tokens
            if (tokens := min(stop, end) - max(first, self.local_tokens)) > 0:
                found[tier] = found.get(tier, 0) + tokens
        return found


@dataclass(slots=True)
class KVOrigin:
    """Where the KV of a request's tokens comes from (`BlockProvenance`).

    local_tokens: vLLM had these in its own cache when it asked last. loaded_tokens: planned since.
    known_tokens: what lies behind them was not computed or loaded by this engine under the prefix
    of the request's names. filled_tokens: whose blocks are known.
    """

    local_tokens: int = 0
    loaded_tokens: int = 0
    known_tokens: int = sys.maxsize
    filled_tokens: int = 0


@dataclass(slots=True)
class Tracked:
    """One request. Chunk numbers are in units of ``chunk_tokens``.

    prefix: of the names of its chunks; None if it is not cached. considered_chunks: leading chunks
    for which a store was planned or ruled out. matched: vLLM knows the number of tokens to load,
    and has not allocated blocks since. started: vLLM has allocated blocks for it, also before a
    preemption. loading: its load, until that has ended. computes: the rest, without another lookup.
    """

    request: Request
    prefix: bytes | None
    options: RequestOptions
    hash_tokens: int
    chunk_tokens: int = 0
    lookup: RequestLookup | None = None
    considered_chunks: int = 0
    origin: KVOrigin = field(default_factory=KVOrigin)
    matched: bool = False
    started: bool = False
    loading: Planned | None = None
    computes: bool = False

    @property
    def canary_chunks(self) -> int:
        """Leading chunks that are compared with what the lookup has pinned."""
        return (self.lookup.canary_chunks or 0) if self.lookup is not None else 0

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        headers: Mapping[str, str] | None = needs.TRACE_HEADERS.of(self.request)
        return headers

    def hashed_tokens(self) -> int:
        return len(self.request.block_hashes) * self.hash_tokens

    def chunk_hashes(self) -> Sequence[bytes]:
        """vLLM's hash at the end of each chunk."""
        stride = self.chunk_tokens // self.hash_tokens
        hashes: Sequence[bytes] = self.request.block_hashes
        return hashes[stride - 1 :: stride]

    def is_client_named(self, chunk: int) -> bool:
        """Whether the name of a chunk covers a medium's name, which its client may have given."""
        end = (chunk + 1) * self.chunk_tokens
        features = needs.MM_FEATURES.of(self.request)
        return any(each.mm_position.offset < end for each in features)

    def chunk_names(self) -> Sequence[bytes]:
        hashes = self.chunk_hashes()
        return [self.prefix + each for each in hashes] if self.prefix else hashes


class RequestNames:
    """What the names of a request's chunks begin with: ``epoch | adapter digest``."""

    def __init__(
        self,
        epochs: Epochs,
        media: MediaNames | None = None,
        adapters: AdapterDigests | None = None,
    ) -> None:
        self.epochs = epochs
        self.adapters = adapters or AdapterDigests()
        self._media = media

    def prefix(self, request: Request) -> bytes | None:
        """The prefix of the names of its chunks; None if its KV cannot be identified."""
        if self._media and not self._media.are_of_content(request):
            return None
        if request.lora_request is None:
            return self.epochs.current
        digest = self.adapters.digest(request.lora_request)
        return None if digest is None else self.epochs.current + digest

    def has_other_adapter(self, request: Request, prefix: bytes | None) -> bool:
        """Whether vLLM has another adapter in memory than the prefix of a request's names says."""
        if prefix is None or request.lora_request is None:
            return False
        held = self.adapters.in_memory(request.lora_request)
        return held is not None and not (held and prefix.endswith(held))


class MediaNames:
    """Whether the images and other media of an engine's requests are named by their content.

    A block hash covers a medium by its identifier: a digest of its content, unless vLLM counts them
    (``vllm/renderers/base.py``) or a client names one: docs/internals/identity.md. A client's name
    that is as long as a digest cannot be told from one here. So two contents may have one name, and
    what canaries find of names with media says nothing about a layout (`Tracked.is_client_named`).
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        media = needs.MULTIMODAL.of(vllm_config.model_config)
        self.are_counted = (
            media is not None
            and media.mm_processor_cache_gb == 0
            and not vllm_config.cache_config.enable_prefix_caching
        )
        is_long = needs.MM_HASHER.of(media) == "sha512"
        self._digest = _LONG_DIGEST if is_long else _DIGEST
        self._has_warned = False

    def are_of_content(self, request: Request) -> bool:
        """True also for a request without media."""
        # An adapter's name may stand before the digest, with a colon.
        digests = [each.identifier.rpartition(":")[2] for each in request.mm_features]
        if not digests or (not self.are_counted and all(map(self._digest.fullmatch, digests))):
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "media are cached if their names are digests, but not by a client's uuid, nor by "
                "vLLM's number without --enable-prefix-caching and --mm-processor-cache-gb"
            )
        return False
