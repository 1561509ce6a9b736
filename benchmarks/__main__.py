# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench`: measures this machine and prints tables.

Each benchmark can write its rows as JSON (machine included) with --json FILE.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report import show, write_json
from lmcache_redis.errors import LMCacheRedisError
from testkit.processes import ended_in_order

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measures this machine. Figures are medians; other programs on the machine disturb them.",
)

JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")]
CompressOption = Annotated[
    bool, typer.Option("--compress", help="bfloat16 KV, beside the same with --compress lossless.")
]
SharesOption = Annotated[
    bool, typer.Option("--shares", help="Beside the same with share_across_tp, in turns.")
]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, max=1000)]


def _sizes(given: str, like: str = "0.25,2,8,32") -> list[float]:
    """The numbers in a list."""
    try:
        return [float(word) for word in given.replace(",", " ").split()]
    except ValueError:
        raise typer.BadParameter(f"{given!r} is not a list like {like}") from None


def _counts(given: str | None) -> list[int]:
    """The whole numbers in a list; empty if no list is given."""
    counts = _sizes(given or "", "1,2,4")
    if any(count < 1 or count % 1 for count in counts):
        raise typer.BadParameter(f"{given!r}: each must be a whole number of 1 or more")
    return [int(count) for count in counts]


def _names(given: str, known: Collection[str]) -> list[str]:
    """The names in a list, in the order of ``known``, each once."""
    words = given.replace(",", " ").split()
    unknown = sorted({*words} - {*known})
    if unknown or not words:
        raise typer.BadParameter(f"{given!r} is not a list of {', '.join(known)}")
    return [name for name in known if name in words]


OWN = "For our client: a list like 1,2,4"
ConnectionsOption = Annotated[
    str | None, typer.Option(help=f"{OWN} of connections for loads, and as many for stores.")
]
ThreadsOption = Annotated[str | None, typer.Option(help=f"{OWN} of network threads.")]
SlotsOption = Annotated[str | None, typer.Option(help=f"{OWN} of slot sizes in KiB.")]


@app.command(name="data-plane")
def data_plane(
    rounds: Annotated[int | None, typer.Option(min=1, max=1000, help="Default 5.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="About a minute; less exact.")] = False,
    url: Annotated[str | None, typer.Option(help="Use this server, and flush it.")] = None,
    chunk_mib: Annotated[str, typer.Option(help="A list of value sizes.")] = "0.25,2,8,32",
    moved_mib: Annotated[
        int | None,
        typer.Option(min=1, help="Moved per measurement, at least eight values. Default 128."),
    ] = None,
    connections: ConnectionsOption = None,
    threads: ThreadsOption = None,
    slot_kib: SlotsOption = None,
    sealed: Annotated[
        bool, typer.Option("--sealed", help="Each setting of our client with sealed values, too.")
    ] = False,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Without other clients.")] = False,
    no_scans: Annotated[bool, typer.Option("--no-scans", help="Without lookups.")] = False,
    plot: Annotated[Path, typer.Option(help="File of the plot.")] = Path(
        "bench-output/data-plane.png"
    ),
    json: JsonOption = None,
) -> None:
    """Chunks to and from Redis, and prefix scans, beside LMCache's client and others.

    Takes about six minutes. Our client runs at its defaults and with one to eight connections. If
    --connections, --threads or --slot-kib is given, it runs with every combination of them
    instead, and the first one is compared with the peers. --sealed shows what sealed values cost.
    """
    from benchmarks.plane import run as benchmark
    from benchmarks.plane.cases import Plan
    from benchmarks.plane.peers import OURS, PEERS, settings_of

    several = (1, 4) if quick else (1, 2, 4, 8)
    slots = [kib << 10 for kib in _counts(slot_kib)]
    settings = {
        OURS: benchmark.settings_of_ours(
            several, _counts(connections), _counts(threads), slots, sealed
        )
    }
    if not no_peers:
        settings |= {peer: settings_of(peer, several) for peer in PEERS}
    plan = Plan(
        settings,
        sizes=[round(mib * (1 << 20)) for mib in _sizes(chunk_mib)],
        moved_bytes=(moved_mib or (64 if quick else 128)) << 20,
        least_items=2 if quick else 8,
        rounds=rounds or (2 if quick else 5),
        scans=() if no_scans else ((1_000, 5 if quick else 10), (10_000, 1)),
    )
    benchmark.run(plan, url, plot, json)


@app.command()
def against(
    base: Annotated[str | None, typer.Option(help="Default: the last tag, or a week ago.")] = None,
    rounds: RoundsOption = 3,
    json: JsonOption = None,
) -> None:
    """This checkout beside another commit, in turns. Fails if a figure is slower in each round.

    Data plane, lookups and main job, with real engines: rounds take minutes.
    """
    from benchmarks import against as benchmark

    commit, rows = benchmark.run(base, rounds)
    _report(f"speed beside {commit}: ratios by round, above 1 is faster", rows, json)
    if any(row["slower"] for row in rows):
        raise typer.Exit(1)


@app.command()
def lookup(
    rounds: RoundsOption = 200, shares: SharesOption = False, json: JsonOption = None
) -> None:
    """A lookup's round trip through the agent, and the agent's start and memory."""
    from benchmarks import lookups as benchmark

    _report("agent", benchmark.run(rounds, shares=shares), json)


@app.command()
def recovery(rounds: RoundsOption = 5, json: JsonOption = None) -> None:
    """Time until requests continue after Redis or the agent stops, and hit after its return."""
    from benchmarks import recovery as benchmark

    _report("recovery", benchmark.run(rounds), json)


@app.command()
def gateway(
    rounds: RoundsOption = 5,
    clients: Annotated[
        int, typer.Option(min=1, max=1000, help="Concurrent clients of the last case.")
    ] = 64,
    before: Annotated[
        Path | None,
        typer.Option(help="Another checkout with its native extension: its gateway takes part."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """The lm:// gateway beside LMCache's server, with the same client. Takes about two minutes."""
    from benchmarks import gateway as benchmark

    rows = benchmark.run(benchmark.Plan(rounds=rounds, clients=clients, before=before))
    _report("lm:// servers, chunks in memory; ours keeps them in Redis as well", rows, json)


@app.command(name="lmcache-door")
def lmcache_door(
    rounds: RoundsOption = 7,
    object_mib: Annotated[str, typer.Option(help="A list of object sizes.")] = "0.25,16",
    moved_mib: Annotated[int, typer.Option(min=1, help="Moved per measurement.")] = 256,
    json: JsonOption = None,
) -> None:
    """Our adapter in LMCache's server beside its own `resp` and `valkey`, by the same calls."""
    from benchmarks import lmcache_door as benchmark

    sizes = [round(mib * (1 << 20)) for mib in _sizes(object_mib)]
    rows = benchmark.run(rounds, sizes, moved_mib << 20)
    _report("L2 adapters of LMCache; ratios to resp, above 1 is faster", rows, json)


@app.command()
def gpu(
    rounds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Default 5, with --quick 2.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="About a minute; less exact.")] = False,
    parts: Annotated[str, typer.Option(help="A list of those below. Default: all.")] = "",
    first_contact: Annotated[
        bool, typer.Option("--first-contact", help="Say what holds on this GPU, in nine minutes.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the figures of first contact.")] = Path(
        "bench-output/first-contact"
    ),
    limit_s: Annotated[
        float, typer.Option(min=1.0, help="For all parts of first contact together.")
    ] = 540.0,
    pack: Annotated[
        Path | None,
        typer.Option(help="Make a folder for first contact on a machine without an index."),
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Python of that machine, like 3.12. Default: as here.")
    ] = None,
    plot: Annotated[Path, typer.Option(help="File of the plot.")] = Path("bench-output/gpu.png"),
    json: JsonOption = None,
) -> None:
    """Copies between a GPU's paged KV cache and the host pool, beside what the hardware moves.

    Needs an NVIDIA GPU and some minutes. The largest cases need 20 GiB of GPU memory and 8 GiB of
    memory that can be pinned (ulimit -l). Each figure stands beside a plain copy of the same
    bytes, measured in the same round, and beside its target:

      kernels   gather and scatter of 1 to 64 chunks: at least 85 % of a device copy's bandwidth
                for pages of 16 KiB and more, 60 % for smaller ones

      agent     STORE and RETRIEVE of 64 chunks: at least 90 % of one copy between GPU and pinned
                memory; and RETRIEVE's median and 99th percentile

      decode    a loop of matrix products with stores beside it: at most 2 % slower

    With --first-contact it says what holds on a GPU that this package has not met, in parts: facts,
    raw, model, ipc_close, batch_soak, copies, pieces, marked, order, busy and stall. Each is a
    process with a limit of its own, and each figure is written when it is there; --quick rehearses
    with tiny sizes. --pack makes the folder for a machine that has torch, but no package index
    and no compiler: copy it there, and run `python3 first-contact` in it.
    """
    words = parts.replace(",", " ").split()
    if pack is not None:
        from benchmarks.gpu.contact.pack import make

        print(make(pack, python or f"{sys.version_info[0]}.{sys.version_info[1]}"))
        return
    if first_contact:
        from benchmarks.gpu.contact import parts as contact
        from benchmarks.gpu.contact.run import report as report_contact
        from benchmarks.gpu.contact.run import run as run_contact

        rows = run_contact(contact.parts_of(words, quick=quick), out, limit_s)
        write_json(json, rows)
        if not report_contact(rows, out):
            raise typer.Exit(1)
        return
    from benchmarks.gpu import run as benchmark
    from benchmarks.gpu.rows import PARTS, QUICK, Options

    chosen = QUICK if quick else Options()
    benchmark.run(replace(chosen, parts=words or PARTS, rounds=rounds or chosen.rounds), plot, json)


@app.command()
def packing(
    rounds: RoundsOption = 7,
    tokens: Annotated[int, typer.Option(min=256, max=8192, help="Of each text.")] = 2048,
    moved_mib: Annotated[int, typer.Option(min=1, help="Moved per measurement.")] = 256,
    dtypes: Annotated[str | None, typer.Option(help="A list of dtypes. Default: all.")] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Ratios of each layer, in the first dtype; a plot.")
    ] = False,
    output_dir: Annotated[Path, typer.Option(help="The plot.")] = Path("bench-output"),
    json: JsonOption = None,
) -> None:
    """Packed payloads of SmolLM2's KV: how much shorter, and how fast beside a copy.

    Takes a minute or two.
    """
    from benchmarks import plots
    from benchmarks.packing import run as benchmark

    chosen = _names(dtypes or ",".join(benchmark.DTYPES), benchmark.DTYPES)
    caches = benchmark.read(tokens, chosen)
    rows = benchmark.ratio_rows(caches)
    show("plain bytes of one stored byte", rows)
    if layers:
        by_layer = benchmark.layer_rows(caches[chosen[0]], chosen[0])
        show(f"plain bytes of one stored byte, {chosen[0]}", by_layer)
        rows = [*rows, *by_layer]
        path = output_dir / "packing.svg"
        plots.report(lambda: benchmark.plot(by_layer, chosen[0], path))
    speeds = benchmark.speed_rows(caches, rounds, moved_mib)
    show("plain bytes, one core", speeds)
    write_json(json, [*rows, *speeds])


@app.command(name="main-job")
def main_job(
    rounds: RoundsOption = 5,
    prompt_tokens: Annotated[int, typer.Option(min=512, max=32_768)] = 4097,
    compress: CompressOption = False,
    shares: SharesOption = False,
    output_dir: Annotated[Path, typer.Option(help="Logs and the model.")] = Path("bench-output"),
    json: JsonOption = None,
) -> None:
    """Time to first token of a real vLLM: cold, from the host pool, from Redis. Takes minutes."""
    from benchmarks import main_job as benchmark

    rows = benchmark.run(output_dir, rounds, prompt_tokens, compress, shares)
    _report(f"main job, prompts of {prompt_tokens} tokens", rows, json)


@app.command(name="working-set")
def working_set(
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="After the first, which computes and stores.")
    ] = 5,
    documents: Annotated[
        int, typer.Option(min=4, max=256, help="At once; also the number of conversations.")
    ] = 16,
    document_tokens: Annotated[int, typer.Option(min=512, max=32_768)] = 2048,
    chunk_tokens: Annotated[
        int, typer.Option(min=32, max=512, help="Of agents and LMCache's servers.")
    ] = 256,
    cases: Annotated[
        str | None, typer.Option(help="A list of cases, from those below. Default: all.")
    ] = None,
    scenarios: Annotated[
        str, typer.Option(help="A list of documents and conversations.")
    ] = "documents,conversations",
    repeat: Annotated[
        int, typer.Option(min=1, max=20, help="Run all cases again, in the reverse order.")
    ] = 1,
    output_dir: Annotated[Path, typer.Option(help="Logs, the model and the plot.")] = Path(
        "bench-output"
    ),
    json: JsonOption = None,
) -> None:
    """Documents and conversations that vLLM's own cache cannot hold, all at once, in rounds.

    Takes several minutes per case. vLLM's own blocks hold half of the set. Cases, one after the
    other, each with a new engine and an empty Redis:

      none            no connector

      own             no connector; vLLM's own blocks hold the whole set: no cache can be faster

      large           our agent; its host pool holds the whole set

      small           our agent; its host pool holds a quarter of the set, the rest is in Redis

      disk            as small, with a disk tier for the whole set

      lmcache-large, lmcache-small    LMCache's multiprocess mode with its Redis adapter and pools
                      of the same sizes, where LMCache's wheel is there and its server starts

    Answers that differ from those of the first case are counted as mismatches.
    """
    from benchmarks.working_set import run as benchmark
    from benchmarks.working_set.cases import CASES
    from benchmarks.working_set.workload import SCENARIOS

    options = benchmark.Options(
        rounds=rounds,
        documents=documents,
        document_tokens=document_tokens,
        chunk_tokens=chunk_tokens,
        repeat=repeat,
        cases=_names(cases or ",".join(CASES), CASES),
        scenarios=_names(scenarios, SCENARIOS),
    )
    benchmark.report(benchmark.run(output_dir, options), output_dir / "working-set.png", json)


@app.command(name="slow-link")
def slow_link(
    rounds: RoundsOption = 5,
    prompt_tokens: Annotated[int, typer.Option(min=257, max=32_768)] = 2049,
    mbits: Annotated[str, typer.Option(help="A list of rates, from fast to slow.")] = (
        "10000,3000,1000,300,100,20"
    ),
    compress: CompressOption = False,
    output_dir: Annotated[Path, typer.Option(help="Logs, the model and the plot.")] = Path(
        "bench-output"
    ),
    json: JsonOption = None,
) -> None:
    """Time to first token by the link's rate: computed, always loaded, and as the agent decides.

    Needs root and iproute2: Redis runs in a network namespace behind a token bucket. Takes minutes.
    """
    from benchmarks import plots
    from benchmarks import slow_link as benchmark

    rates = _sizes(mbits, "1000,100,20")
    rows = benchmark.run(output_dir, rounds, prompt_tokens, rates, compress)
    _report(f"slow link, prompts of {prompt_tokens} tokens", rows, json)
    plots.report(lambda: benchmark.plot(rows, output_dir / "slow-link.png"))


@app.command(name="first-requests")
def first_requests(
    rounds: RoundsOption = 5,
    prompt_tokens: Annotated[int, typer.Option(min=257, max=32_768)] = 2049,
    mbits: Annotated[str, typer.Option(help="A list of rates.")] = "10000,300,100,20",
    pause_s: Annotated[float, typer.Option(min=0.0, help="Before each request.")] = 0.0,
    output_dir: Annotated[Path, typer.Option(help="Logs and the model.")] = Path("bench-output"),
    json: JsonOption = None,
) -> None:
    """The first requests of a new agent, beside an engine that computes them.

    Needs root and iproute2: Redis runs in a network namespace behind a token bucket. Takes minutes.
    """
    from benchmarks import first_requests as benchmark

    rates = _sizes(mbits, "1000,100,20")
    rows = benchmark.run(output_dir, rounds, prompt_tokens, rates, pause_s)
    _report(f"first requests, prompts of {prompt_tokens} tokens", rows, json)


@app.command(name="chunk-size")
def chunk_size(
    rounds: RoundsOption = 5,
    prompt_tokens: Annotated[int, typer.Option(min=512, max=32_768)] = 4096,
    sizes: Annotated[str, typer.Option(help="A list of chunk sizes, in tokens.")] = "256,128,64",
    token_kib: Annotated[int, typer.Option(help="KiB of KV a token: 1, 8 or 64.")] = 64,
    output_dir: Annotated[Path, typer.Option(help="Logs and the model.")] = Path("bench-output"),
    json: JsonOption = None,
) -> None:
    """Time to first token by the chunk size: whole documents, and parts of them. Takes minutes."""
    from benchmarks import chunk_size as benchmark

    if token_kib not in benchmark.SHAPES:
        raise typer.BadParameter(f"--token-kib is {token_kib}: it is 1, 8 or 64")
    rows = benchmark.run(output_dir, rounds, prompt_tokens, _counts(sizes), token_kib)
    _report(f"chunk size, documents of {prompt_tokens} tokens", rows, json)


def _report(title: str, rows: Sequence[Mapping[str, Any]], json: Path | None) -> None:
    show(title, rows)
    write_json(json, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark; returns the exit status. Ends the processes that it started."""
    words = list(arguments) if arguments is not None else None
    try:
        with ended_in_order():
            app(args=words, prog_name="scripts/bench", standalone_mode=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except LMCacheRedisError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
