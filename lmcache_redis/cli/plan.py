# SPDX-License-Identifier: Apache-2.0
"""`plan`: what a cache of some size would save for the requests of a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_redis.cli.options import AsJson, number
from lmcache_redis.cli.size import MOST_TOKENS
from lmcache_redis.errors import ConfigError
from lmcache_redis.settings import parse_size

if TYPE_CHECKING:
    from lmcache_redis.plan.figures import PlanRow, Prices
    from lmcache_redis.plan.pacing import Speeds
    from lmcache_redis.plan.traces import Trace

_DEFAULT_CHUNK_TOKENS = 256
_DEFAULT_PREFILL_TOKENS_PER_S = 10_000
_LEAST_SIZE_BYTES = 1 << 26


def plan(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="TRACE...",
            help="JSON lines: an agent's --record, hash_ids (Mooncake's), or vLLM's KV events.",
            show_default=False,
        ),
    ] = None,
    pool_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...",
            help="Host pool of each replica.",
            show_default="four sizes that suit the trace",
        ),
    ] = None,
    disk_size: Annotated[str, typer.Option(metavar="SIZE,...", help="Disk of each replica.")] = "0",
    redis_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...",
            help="Memory of Redis, shared by all replicas.",
            show_default="none, and two that suit the trace",
        ),
    ] = None,
    redis_ratio: Annotated[
        float,
        number(
            "--redis-ratio",
            float,
            (1, 16),
            "Plain bytes to those stored in Redis, as `status` tells of agents that pack: about "
            "1.4 for bfloat16. The default is for --compress off.",
        ),
    ] = 1.0,
    engine_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="KV cache of each engine's own, whose hits need none of ours. 0 for recordings "
            "and KV events, which do not contain them.",
        ),
    ] = "0",
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N,...", help="Engines, each with its own pool. They get requests in turns."
        ),
    ] = "1",
    store_after: Annotated[
        str, typer.Option(metavar="N,...", help="Requests after which a chunk is stored.")
    ] = "1",
    chunk_size_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Multiples of the trace's blocks.",
            show_default="256, or the trace's blocks",
        ),
    ] = None,
    token_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="KV of a token, if the trace does not say. Llama 3.1 8B has 128KiB.",
        ),
    ] = "128KiB",
    block_tokens: Annotated[
        int, number("--block-tokens", int, (1, MOST_TOKENS), "Tokens of a block with a hash id.")
    ] = 512,
    prefill_tokens_per_s: Annotated[
        float | None,
        number(
            "--prefill-tokens-per-s",
            float,
            (1, MOST_TOKENS),
            "How fast a replica computes prompts.",
            show_default="as recorded, else 10000",
        ),
    ] = None,
    link_gbit: Annotated[
        float, number("--link-gbit", float, (0.001, 10**6), "Gbit/s of Redis's link.")
    ] = 25,
    disk_gbyte: Annotated[
        float, number("--disk-gbyte", float, (0.001, 10**6), "Gbyte/s of each replica's disk.")
    ] = 2,
    usd_per_gib_month: Annotated[
        float,
        number("--usd-per-gib-month", float, (0, 10**6), "Of memory, in host pools and in Redis."),
    ] = 3.0,
    usd_per_disk_gib_month: Annotated[
        float, number("--usd-per-disk-gib-month", float, (0, 10**6), "Of disk.")
    ] = 0.1,
    usd_per_gpu_hour: Annotated[
        float, number("--usd-per-gpu-hour", float, (0, 10**6), "Of all GPUs of one replica.")
    ] = 2.5,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with plots there.")
    ] = None,
    example: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Make a trace, write it there, and use it.")
    ] = None,
    example_requests: Annotated[
        int, number("--example-requests", int, (1, 10**8), "Requests of --example.")
    ] = 2000,
    as_json: AsJson = False,
) -> None:
    """Show what a cache of some size would save: hit rates, GPU time, the link, money.

    Nothing is measured and no server is asked: requests of a trace are replayed against sizes.

    Examples:

      lmcache-redis plan --example trace.jsonl --html plan.html

      lmcache-redis plan recorded.jsonl --redis-bytes 0,256GiB
    """
    from lmcache_redis.plan.figures import Grid, Prices, plan_rows, stored_less
    from lmcache_redis.plan.pacing import Speeds
    from lmcache_redis.plan.reading import read_trace
    from lmcache_redis.plan.shown import admission

    paths = [*(traces or [])]
    if example is not None:
        from lmcache_redis.plan.example import example_lines

        _write(example, (f"{line}\n" for line in example_lines(example_requests)), "--example")
        paths.append(example)
    if not paths:
        raise ConfigError("there is no TRACE: name a file, or make one with --example FILE")
    trace = read_trace(paths, block_tokens, parse_size(token_bytes, "--token-bytes"))
    known_s = 1 / prefill_tokens_per_s if prefill_tokens_per_s else trace.token_s
    token_s = known_s or 1 / _DEFAULT_PREFILL_TOKENS_PER_S
    speeds = Speeds(token_s, link_gbit * 1e9 / 8, disk_gbyte * 1e9)
    prices = Prices(usd_per_gib_month, usd_per_disk_gib_month, usd_per_gpu_hour)
    block = trace.layout.block_tokens
    chunks = chunk_size_tokens or str(-(-_DEFAULT_CHUNK_TOKENS // block) * block)
    chunk_tokens = _counts("--chunk-size-tokens", chunks, 1 << 20)
    pool_sizes, redis_sizes = _tier_sizes(trace, chunk_tokens[0], pool_bytes, redis_bytes)
    grid = Grid(
        replicas=_counts("--replicas", replicas, 10_000),
        chunk_tokens=chunk_tokens,
        pool_bytes=pool_sizes,
        disk_bytes=_sizes("--disk-size", disk_size),
        redis_bytes=redis_sizes,
        engine_bytes=parse_size(engine_bytes, "--engine-bytes"),
        redis_ratio=redis_ratio,
        store_after=_counts("--store-after", store_after, 255),
    )
    rows = plan_rows(trace, grid, speeds, prices)
    less = stored_less(trace, rows, speeds, prices)
    notes = [*trace.notes] if less is None else [admission(*less), *trace.notes]
    _show(paths, trace, notes, rows, _assumed(trace, speeds, prices, redis_ratio), html, as_json)


def _write(path: Path, text: Iterable[str], option: str) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(text)
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be written ({error.strerror}): name another file"
        ) from error


# ---------------------------------------------------------------- options


def _each(option: str, text: str, read: Callable[[str], int]) -> list[int]:
    """The values of a list with commas, each once. Raises ``ConfigError``."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ConfigError(f"{option} is {text!r}: write values with commas between them")
    return [*dict.fromkeys(map(read, words))]


def _sizes(option: str, text: str) -> list[int]:
    return _each(option, text, lambda word: parse_size(word, option))


def _counts(option: str, text: str, most: int) -> list[int]:
    def read(word: str) -> int:
        if not word.isdecimal() or not 1 <= int(word) <= most:
            raise ConfigError(f"{option} is {text!r}: write whole numbers from 1 to {most}")
        return int(word)

    return _each(option, text, read)


def _tier_sizes(
    trace: Trace, chunk_tokens: int, pool_bytes: str | None, redis_bytes: str | None
) -> tuple[list[int], list[int]]:
    """Of host pool and Redis: those that are asked for, else some that suit the trace."""
    from lmcache_redis.plan.simulate import Replay

    pools = None if pool_bytes is None else _sizes("--pool-bytes", pool_bytes)
    redis = None if redis_bytes is None else _sizes("--redis-bytes", redis_bytes)
    if pools is None or redis is None:
        whole = _power_of_two(Replay(trace.in_chunks(chunk_tokens)).enough_bytes())
        pools = pools or [*dict.fromkeys(_power_of_two(whole >> shift) for shift in (4, 3, 2, 0))]
        redis = redis or [*dict.fromkeys((0, _power_of_two(whole >> 1), whole))]
    return pools, redis


def _power_of_two(nbytes: int) -> int:
    """The next one that is not smaller, and not below the least size."""
    return 1 << max(_LEAST_SIZE_BYTES - 1, nbytes - 1).bit_length()


# ----------------------------------------------------------------- output


def _show(
    paths: Sequence[Path],
    trace: Trace,
    notes: Sequence[str],
    rows: Sequence[PlanRow],
    assumed: Mapping[str, str],
    html: Path | None,
    as_json: bool,
) -> None:
    from lmcache_redis.plan import shown

    notes = [*notes, *shown.warnings(rows)]
    name = ", ".join(path.name for path in paths)
    if html is not None:
        text = shown.page(f"Plan for {name}", assumed, notes, rows)
        _write(html, [text], "--html")
    if as_json:
        document = {
            "trace": {
                "requests": len(trace),
                "prompt_tokens": int(trace.tokens.sum()),
                "duration_s": trace.duration_s or None,
                "block_tokens": trace.layout.block_tokens,
                "measured": trace.measured,
            },
            "assumed": assumed,
            "notes": notes,
            "rows": [row._asdict() for row in rows],
        }
        print(json.dumps(document, indent=2))
        return
    from lmcache_redis.cli.shown import console

    out = console()
    out.print(_table(f"{name}: {len(trace):,} requests", rows))
    for line in (shown.sentence(rows), *notes):
        out.print(line)
    for key, value in assumed.items():
        out.print(f"  {key}: {value}", style="dim")
    if html is not None:
        out.print(f"page: {html}")


def _table(title: str, rows: Sequence[PlanRow]) -> Any:
    """Of the columns that differ between rows, and of all that the rows have found."""
    from rich.table import Table

    from lmcache_redis.plan.figures import best_row
    from lmcache_redis.plan.shown import COLUMNS

    best = best_row(rows)
    always = {"pool GiB", "Redis GiB", "hit rate", "GPU s saved", "$ a month"}
    # What is stored differs with Redis; it matters where it is chosen.
    unasked = {"stored GiB"} if len({row.store_after for row in rows}) == 1 else set()
    table, kept = Table(title=title), []
    for column, text in COLUMNS.items():
        if column in unasked:
            continue
        texts = [text(row) for row in rows]
        if column in always or len(set(texts)) > 1:
            table.add_column(column, justify="right")
            kept.append(texts)
    for row, *cells in zip(rows, *kept, strict=True):
        table.add_row(*cells, style="bold" if row is best else None)
    return table


def _assumed(trace: Trace, speeds: Speeds, prices: Prices, redis_ratio: float) -> dict[str, str]:
    token_bytes = trace.layout.nbytes / trace.layout.block_tokens
    link = speeds.link_bytes_per_s / 1e6
    packed = f", {redis_ratio:g} times smaller in Redis" if redis_ratio > 1 else ""
    return {
        "KV": f"{token_bytes / 1024:.4g} KiB a token{packed}",
        "prefill": f"{1 / speeds.token_s:,.0f} tokens a second and replica",
        "link to Redis": f"{link:,.0f} MB/s, {math.ceil(speeds.latency_s * 1e3)} ms for a question",
        "disk": f"{speeds.disk_bytes_per_s / 1e6:,.0f} MB/s and replica",
        "prices": f"${prices.gib_month:g} a GiB of memory and month, ${prices.disk_gib_month:g} of "
        f"disk, ${prices.gpu_hour:g} a replica's GPU hour",
    }
