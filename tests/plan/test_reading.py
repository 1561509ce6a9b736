# SPDX-License-Identifier: Apache-2.0
"""Traces from files: what is read from each kind, and which line is named if one is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.errors import ConfigError, FormatError
from lmcache_redis.plan.reading import read_trace
from lmcache_redis.plan.traces import Trace

A, B, C, D = ("00000000000000a1", "b" * 16, "c" * 16, "d" * 16)
LAYOUT = {
    "type": "layout",
    "time": 1.0,
    "name": "l",
    "model": "m",
    "chunk_tokens": 64,
    "rows": [
        {"part": "p0", "bytes": 100, "pool_bytes": 128},
        {"part": "p1", "bytes": 50, "pool_bytes": 64, "reach": "window", "reach_tokens": 70},
    ],
}
LOOKUP = {
    **{"type": "lookup", "time": 3.0, "request": "r", "layout": "l", "first_chunk": 2},
    **{"chunks": A + B, "hits": "h", "token_s": 0.25},
}
START = {"type": "start", "time": 0.5, "version": 1}


def read(tmp_path: Path, *lines: Any) -> Trace:
    path = tmp_path / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return read_trace([path], 16, 10)


def requests(trace: Trace) -> list[list[int]]:
    return [each.tolist() for each in np.split(trace.ids, trace.starts[1:-1])]


def test_hash_ids_are_whole_blocks_in_the_order_of_time(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        {"timestamp": 2000, "input_length": 40, "output_length": 9, "hash_ids": [7, 8, 9]},
        "",
        {"timestamp": 1000, "input_length": 32, "hash_ids": [7, 8]},
    )
    assert trace.times_s.tolist() == [1.0, 2.0]
    assert trace.tokens.tolist() == [32, 40]
    assert trace.asked.tolist() == [2, 2]  # the third block is not full
    assert requests(trace)[0] == requests(trace)[1]
    assert (trace.layout.block_tokens, trace.layout.nbytes) == (16, 160)
    assert trace.has_times


def test_equal_ids_behind_other_blocks_are_other_chunks(tmp_path: Path) -> None:
    lines = [{"hash_ids": ids} for ids in ([1, 2, 3], [1, 2, 4], [5, 2, 3], [1, 2, 3, 3])]
    first, second, third, fourth = requests(trace := read(tmp_path, *lines))
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert not {*first} & {*third}
    assert fourth[:3] == first
    assert fourth[3] not in first
    assert not trace.has_times
    assert trace.times_s.tolist() == [0, 1, 2, 3]


def test_ids_may_be_text_or_of_any_size(tmp_path: Path) -> None:
    big = (1 << 64) - 1
    lines = [{"hash_ids": ids} for ids in (["x", big, 5], [5], ["x", big, 5], [5, "x"])]
    first, second, third, fourth = requests(read(tmp_path, *lines))
    assert first == third
    assert second == fourth[:1]  # the same block in a line that has others
    assert len({*first, *fourth}) == 5


def test_a_recording_has_lookups_and_what_was_generated(tmp_path: Path) -> None:
    store = {"type": "store", "request": "r", "part": "p0"}
    trace = read(
        tmp_path,
        START,
        LAYOUT,
        LOOKUP,
        {**store, "time": 4.0, "chunks": B + C},
        {**store, "time": 4.1, "chunks": B + C, "part": "p1"},  # another rank's
        {**store, "time": 5.0, "chunks": D, "request": "without a lookup"},
        {"type": "dropped", "time": 6.0, "lines": 3},
    )
    assert trace.asked.tolist() == [2, 0, 0]
    assert trace.tokens.tolist() == [128, 0, 0]
    assert trace.first.tolist() == [2, 0, 0]
    assert [len(each) for each in requests(trace)] == [2, 1, 1]
    assert len({*trace.ids.tolist()}) == 4
    assert trace.layout.pool_bytes == 192
    assert trace.layout.part_bytes == {FULL_REACH: 100, Reach("window", 70): 50}
    assert trace.token_s == 0.25
    assert trace.measured is not None
    assert trace.measured["hit_rate_pool"] == 0.5
    assert "left out 3 lines" in trace.notes[1]


def test_equal_names_in_another_layout_are_other_chunks(tmp_path: Path) -> None:
    """As those of an engine with other weights."""
    rows = [{**row, "part": f"{row['part']} of k"} for row in LAYOUT["rows"]]
    k = {**LAYOUT, "name": "k", "rows": rows}
    store = {"type": "store", "time": 4.0, "request": "r", "part": "p0 of k", "chunks": A + B}
    trace = read(tmp_path, START, LAYOUT, k, LOOKUP, {**LOOKUP, "layout": "k"}, store, LOOKUP)
    first, second, third = requests(trace)
    assert first == third
    assert not {*first} & {*second}


def test_kv_events_are_requests_behind_the_engines_cache(tmp_path: Path) -> None:
    def stored(hashes: list[Any], parent: Any = None, **more: Any) -> dict[str, Any]:
        fields = {"block_hashes": hashes, "parent_block_hash": parent, "block_size": 16}
        return {"type": "BlockStored", "token_ids": [], "lora_id": None} | fields | more

    trace = read(
        tmp_path,
        [10.0, [stored([1, 2])], 0],
        [10.5, [stored([3, 4], 2), {"type": "AllBlocksCleared"}]],
        [11.0, [stored([5], 4), stored([6], 5)], 0],  # generated
        [11.5, [stored([1, 2], None, medium="CPU"), stored([1], group_idx=1)], 0],
        [12.0, [{"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU"}], 0],
        [13.0, [stored([1, 2])], 0],
    )
    assert trace.times_s.tolist() == [10.0, 13.0]
    assert trace.asked.tolist() == [4, 2]
    first, second = requests(trace)
    assert (len(first), first[:2]) == (6, second)
    assert "own cache" in trace.notes[0]


def test_blocks_of_one_token_are_blocks(tmp_path: Path) -> None:
    event = {"type": "BlockStored", "block_hashes": ["a", "b"], "block_size": 1}
    trace = read(tmp_path, [1.0, [event]], [2.0, [event]])
    assert (trace.layout.block_tokens, trace.layout.nbytes) == (1, 10)
    assert trace.asked.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["{"], "line 1 of"),
        (['{"other": 1}'], "line 1 of .*neither a prompt"),
        ([{"hash_ids": [1]}, {"hash_ids": "x"}], r"line 2 of .*hash_ids"),
        ([{"hash_ids": [1]}, "", "nothing"], "line 3 of"),
        ([{"hash_ids": [1]}, {"hash_ids": [1], "input_length": 17}], "line 2 .*--block-tokens"),
        ([{"hash_ids": [1]}, {"hash_ids": [1], "timestamp": -1}], "line 2 .*timestamp"),
        ([START, LAYOUT, {"type": "lookup", "time": 1}], "line 3 of"),
        ([START, {**LAYOUT, "chunk_tokens": 0}], "line 2 of .*chunk_tokens"),
        ([START, LAYOUT, {**LOOKUP, "hits": "hx"}], "line 3 of .*hits"),
        ([START, LAYOUT, {**LOOKUP, "layout": "k"}], "line 3 of .*no line before describes 'k'"),
        ([START, LAYOUT, {**LAYOUT, "chunk_tokens": 32}], "line 3 of .*of another size"),
        ([START, LAYOUT, {**LOOKUP, "chunks": "0"}], "line 3 of .*no multiple of 16"),
        (
            [START, {"type": "store", "time": 1, "request": "r", "part": "p9", "chunks": A}],
            "line 2 of .*no line before describes 'p9'",
        ),
        ([[1.0, [{"type": "BlockStored", "block_hashes": [1]}], 0]], "line 1 of .*0 tokens"),
        ([[1.0, [], 0]], "no BlockStored event"),
        ([{"hash_ids": []}], "no request with a whole block"),
        ([""], "is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: list[Any], says: str) -> None:
    with pytest.raises(FormatError, match=says):
        read(tmp_path, *lines)


def test_a_file_that_is_not_there_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.jsonl cannot be read"):
        read_trace([tmp_path / "nothing.jsonl"], 16, 10)
