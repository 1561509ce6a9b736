"""A sample of what a cache holds: how large its chunks are, and how long the oldest lie unused."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmcache_redis.admin.facts import Need
from lmcache_redis.admin.server import PrimaryServers
from lmcache_redis.admin.sizes.sizing import stored_part
from lmcache_redis.admin.stripes import read_uses
from lmcache_redis.admin.survey import Form, SeenChunk, Striping, headers_of, survey
from lmcache_redis.chunks.frame import StripeHeader
from lmcache_redis.errors import RedisError

_SAMPLE_CHUNKS, _SAMPLE_KEYS = 200, 20_000
_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class StoredSample:
    """need: by the chunks that are stored, unless the user has named a size. headers: one of each
    layout, model and worker, by model. oldest_idle_s: of the chunks seen, the longest time without
    a use; None if not kept."""

    need: Need
    headers: tuple[tuple[str, StripeHeader], ...] = ()
    oldest_idle_s: float | None = None


def sample(
    server: PrimaryServers, prefix: bytes, need: Need, report: Mapping[str, Any] | None
) -> StoredSample:
    """Before Redis 7.2 reading a header counts as a use of its chunk. Empty if it is refused.

    report: of an agent, which knows how many tokens a chunk has; else it is the usual number.
    """
    try:
        seen = survey(server, prefix, most_chunks=_SAMPLE_CHUNKS, most_keys=_SAMPLE_KEYS)
        chunks = list(seen.chunks.values())
        uses = read_uses(server, [chunk.name.stripe(chunk.first) for chunk in chunks])
        headers = headers_of(server, chunks)
    except RedisError:
        return StoredSample(need)
    idle = [use.idle_s for use in uses if use.idle_s is not None]
    if not need.is_known and headers:
        need = _as_stored(need, chunks, headers, report or {})
    of_model = tuple((form[1], header) for form, header in headers.items())
    return StoredSample(need, of_model, max(idle, default=None))


def _as_stored(
    need: Need,
    chunks: Iterable[SeenChunk],
    headers: Mapping[Form, StripeHeader],
    report: Mapping[str, Any],
) -> Need:
    """The need by the median chunk of the model with the most chunks.

    Parts of one chunk have one hash: those of several groups and ranks are added up.
    """
    found: dict[tuple[str, bytes], list[int]] = {}
    for chunk in chunks:
        header = headers.get(chunk.form)
        if header is not None:
            model = chunk.name.key.model_name
            payload = Striping.of(header).stripe_payload_bytes
            part = stored_part(header.chunk_bytes, payload, model)
            total = found.setdefault((model, chunk.name.key.chunk_hash), [0, 0])
            total[0] += part.part_bytes
            total[1] += part.memory_bytes
    model = Counter(name for name, _ in found).most_common(1)[0][0]
    own = [total for (name, _), total in found.items() if name == model]
    chunk_bytes, memory_bytes = map(statistics.median, zip(*own, strict=True))
    engines = [each for each in report.get("engines", ()) if each["model"] == model]
    tokens = report.get("chunk_size_tokens", _CHUNK_TOKENS)
    tokens = engines[0]["chunk_tokens"] if engines else tokens
    return replace(
        need,
        kv_bytes_per_token=max(1, int(chunk_bytes // tokens)),
        memory_per_token=memory_bytes / tokens,
        loaded_per_token=0.0,
        of=f"{model}, as stored in chunks of {tokens} tokens",
        is_known=True,
    )
