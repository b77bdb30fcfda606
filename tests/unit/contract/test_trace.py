"""Recorded traffic of every format, written here with the published names of fields: times, lengths, shared prefixes.

Small texts stand for the public files; what is wrong in one is named with file, line and field.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferloop.contract.load import parse
from inferloop.contract.sample import SampledWorkload, sample_workload
from inferloop.contract.trace.lines import json_array
from inferloop.core.errors import ContractError, TraceError, UsageError
from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.records.bench import RequestRow, to_parquet
from inferloop.records.event import ReplicaEvent

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
119,GPT-4,417,276,693,API log
"""
BURSTGPT_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
0,a,1.5,ChatGPT,100,40,140,Conversation log
7,b,1.5,ChatGPT,90,10,100,Conversation log
20,a,1.5,ChatGPT,180,30,210,Conversation log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 1300, "output_length": 26, "hash_ids": [46, 47, 2366]}
{"timestamp": 30535, "input_length": 512, "output_length": 1, "hash_ids": [46]}
"""
SHAREGPT = json.dumps(
    [
        {
            "id": "QWJhYvA_0",
            "conversations": [
                {"from": "human", "value": "a" * 200},
                {"from": "gpt", "value": "b" * 120},
                {"from": "human", "value": "c" * 100},
                {"from": "gpt", "value": "d" * 40},
            ],
        },
        {"id": "i6IyJda_0", "conversations": [{"from": "gpt", "value": "nobody asked"}]},
        {
            "id": "A5AbcES_0",
            "conversations": [{"from": "human", "value": "secret " * 40}, {"from": "gpt", "value": "x" * 8}],
        },
    ],
    indent=2,
)


def replay(
    tmp_path: Path, content: str | Path, seed: int = 1, base: dict[str, Any] | None = None, **changes: Any
) -> SampledWorkload:
    how = {
        k: changes.pop(k)
        for k in list(changes)
        if k in ("num_requests", "duration_s", "context_limit", "qps", "stream", "count_tokens")
    }
    if isinstance(content, str):
        path = tmp_path / "trace.txt"
        path.write_text(content)
    else:
        path = content
    values = {"model": "m", "qps": 2, "input_tokens": 100, "output_tokens": 10}
    trace = {"process": "trace", "file": str(path), **changes}
    return sample_workload(parse(values | (base or {}) | {"arrivals": trace}, base=tmp_path), seed=seed, **how)


def shape(workload: SampledWorkload) -> list[tuple[float, int, int]]:
    return [(r.at_s, r.input_tokens, r.output_tokens) for r in workload.requests]


def test_azure(tmp_path: Path) -> None:
    workload = replay(tmp_path, AZURE_2023)
    assert shape(workload) == [
        (0.0, 374, 44),
        (pytest.approx(4.314579, abs=2e-6), 396, 109),
        (pytest.approx(4.541877, abs=2e-6), 879, 55),
    ]
    assert workload.offered_qps == pytest.approx(2 / 4.541877, rel=1e-6)
    assert shape(replay(tmp_path, AZURE_2024)) == [(0.0, 2162, 5), (pytest.approx(0.007405), 2399, 6)]


def test_burstgpt_leaves_out_what_failed_there(tmp_path: Path) -> None:
    workload = replay(tmp_path, BURSTGPT)
    assert shape(workload) == [(0.0, 472, 18), (40.0, 1087, 230), (114.0, 417, 276)]
    assert workload.num_skipped == 1


def test_burstgpt_sessions_repeat_what_was_said(tmp_path: Path) -> None:
    a, b, again = replay(tmp_path, BURSTGPT_SESSIONS).requests
    assert again.segments[:1] == a.segments and b.segments[0].key != a.segments[0].key
    assert [(s.num_tokens, s.role) for s in again.segments] == [(100, "user"), (40, "assistant"), (40, "user")]
    assert (a.at_s, a.after, a.session) == (0.0, None, again.session) and b.session is None
    assert (again.at_s, again.after) == (18.5, a.index), "as long after the answer as it was there"
    assert replay(tmp_path, BURSTGPT_SESSIONS, time_scale=0.1).requests[2].at_s == 1.85
    silent = BURSTGPT_SESSIONS.replace("Elapsed time", "Whatever")
    assert replay(tmp_path, silent).requests[2].at_s == 20.0, "without an end, as long after the question"
    hasty = BURSTGPT_SESSIONS.replace("0,a,1.5", "0,a,21.5")
    assert replay(tmp_path, hasty).requests[2].at_s == 0.0, "nobody answers what was not said yet"


def test_mooncake_has_milliseconds_and_real_prefixes(tmp_path: Path) -> None:
    workload = replay(tmp_path, MOONCAKE)
    first, second, third = workload.requests
    assert [r.at_s for r in workload.requests] == pytest.approx([0.0, 3.053, 3.053])
    assert [s.num_tokens for s in first.segments] == [512, 512, 176]
    assert second.segments[:2] == first.segments[:2] and second.segments[2].key != first.segments[2].key
    assert third.segments == first.segments[:1]
    assert workload.prefix_reuse == (1024 + 512) / (1200 + 1300 + 512)
    assert workload.declared_prefix_reuse == workload.prefix_reuse, (
        "the trace says what is shared, whatever is declared"
    )


@pytest.mark.parametrize("size", [16, 64, 512, 1024])
def test_blocks_of_other_sizes_share_what_they_are(tmp_path: Path, size: int) -> None:
    """Two prompts with the first two blocks in common. The size stands nowhere: the numbers of ids tell it."""
    rows = [
        {"timestamp": 1000 * i, "input_length": n, "output_length": 5, "hash_ids": ids}
        for i, (n, ids) in enumerate([(3 * size, [1, 2, 3]), (3 * size - 1, [1, 2, 4]), (3 * size + 1, [5, 6, 7, 8])])
    ]
    first, second, third = replay(tmp_path, "".join(json.dumps(r) + "\n" for r in rows)).requests
    assert [s.num_tokens for s in first.segments] == [size] * 3
    assert second.segments[:2] == first.segments[:2] and second.segments[2].key != first.segments[2].key
    assert [s.num_tokens for s in third.segments] == [size] * 3 + [1]


def test_prompts_that_are_named_in_part_have_the_rest_for_themselves(tmp_path: Path) -> None:
    rows = MOONCAKE.replace("[46, 47, 48]", "[46]").replace("[46, 47, 2366]", "[46]")
    first, second, _ = replay(tmp_path, rows).requests
    assert [s.num_tokens for s in first.segments] == [512, 688] and first.segments[0] == second.segments[0]


def test_sharegpt_becomes_conversations(tmp_path: Path) -> None:
    workload = replay(tmp_path, SHAREGPT, base={"turns": 2, "think_ms": 1500})
    turns = [r for r in workload.requests if r.session is not None]
    (single,) = [r for r in workload.requests if r.session is None]
    assert [(t.input_tokens, t.output_tokens) for t in turns] == [(50, 30), (105, 10)]
    assert (turns[1].after, turns[1].at_s) == (turns[0].index, 1.5)
    assert [(s.num_tokens, s.role) for s in turns[1].segments] == [(50, "user"), (30, "assistant"), (25, "user")]
    assert (single.input_tokens, single.output_tokens) == (70, 2)
    by_letters = replay(tmp_path, SHAREGPT, count_tokens=len)
    assert {r.output_tokens for r in by_letters.requests} == {120, 40, 8}
    assert workload.offered_qps is None


def test_no_word_of_a_trace_is_left(tmp_path: Path) -> None:
    """What will be sent follows from the keys, and these from the run's seed: the same trace, other prompts."""
    for content in (SHAREGPT, MOONCAKE):
        one, same, other = (replay(tmp_path, content, seed=s) for s in (1, 1, 2))
        assert one == same
        keys = [{s.key for r in w.requests for s in r.segments} for w in (one, other)]
        assert not keys[0] & keys[1]
        assert "secret" not in repr(one) and not keys[0] & {46, 47, 48, 2366}
        part = replay(tmp_path, content, stream="peak/1")
        assert not keys[0] & {s.key for r in part.requests for s in r.segments}


def test_a_finished_run_is_a_trace(tmp_path: Path) -> None:
    def row(i: int, *, warmup: bool = False, **more: Any) -> RequestRow:
        sent = 10**12 + i * 500_000_000
        timing = RequestTiming(
            f"r{i}", sent, sent + 7, sent + 8, sent + 9, (Chunk(sent + 9, 5),), 100 + 50 * i, 5, **more
        )
        return RequestRow("peak", warmup, timing)

    (tmp_path / "run").mkdir()
    rows = [row(0, warmup=True), row(3, session=1, traffic_class="long"), row(1, session=1), row(2)]
    (tmp_path / "run" / "requests.parquet").write_bytes(to_parquet(rows))
    for path in (tmp_path / "run", tmp_path / "run" / "requests.parquet"):
        found = replay(tmp_path, path).requests
        assert [(r.at_s, r.input_tokens, r.traffic_class) for r in found] == [
            (0.0, 150, "default"), (0.5, 200, "default"), (1.0 - 9e-9, 250, "long"),
        ]  # fmt: skip
        assert [(r.after, r.session) for r in found] == [(None, 0), (None, None), (0, 0)]
        assert found[2].segments[:1] == found[0].segments


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_exported_events_are_a_trace(tmp_path: Path, suffix: str) -> None:
    events = [
        ReplicaEvent(
            event_id=f"e{i}",
            trace_id="t",
            span_id="s",
            request_id="r",
            identity_digest="d",
            model_id="m",
            t_engine_in_ns=5,
            t_wall_ns=10**18 + i * 250_000_000,
            finish_reason="stop",
            attempt=2 if i == 2 else 1,
            num_input_tokens=30 + i,
            num_output_tokens=4,
        )
        for i in range(4)
    ]
    rows = [{name: getattr(e, name) for name in ReplicaEvent.__slots__} for e in events]
    path = tmp_path / f"events{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    assert shape(replay(tmp_path, path)) == [(0.0, 30, 4), (0.25, 31, 4), (0.75, 33, 4)], "a retry is no second user"


def test_time_scale_and_limits(tmp_path: Path) -> None:
    assert [r.at_s for r in replay(tmp_path, BURSTGPT, time_scale=0.5).requests] == [0.0, 20.0, 57.0]
    assert len(replay(tmp_path, BURSTGPT, max_requests=2).requests) == 2
    assert len(replay(tmp_path, BURSTGPT, num_requests=1).requests) == 1
    early = replay(tmp_path, BURSTGPT, duration_s=57.0, time_scale=0.5)
    assert (len(early.requests), early.num_later) == (2, 1)
    assert replay(tmp_path, BURSTGPT).num_later == 0
    clipped = replay(tmp_path, BURSTGPT, context_limit=600)
    assert [(r.input_tokens, r.output_tokens) for r in clipped.requests] == [(472, 18), (370, 230), (324, 276)]
    assert (clipped.num_clipped, clipped.num_skipped) == (2, 1)
    skipped = replay(tmp_path, BURSTGPT, context_limit=600, max_context="skip")
    assert [r.input_tokens for r in skipped.requests] == [472]
    assert (skipped.num_clipped, skipped.num_skipped) == (0, 3)


def test_of_a_long_trace_only_the_window_is_kept(tmp_path: Path) -> None:
    """Whatever the order of its lines: what is later is counted."""
    header = BURSTGPT.splitlines()[0]
    for order in (range(500), range(499, -1, -1), [250, 3, 499, *(i for i in range(500) if i not in (250, 3, 499))]):
        rows = "".join(f"{100 + i},m,200,10,0,x\n" for i in order)
        workload = replay(tmp_path, f"{header}\n{rows}", duration_s=10.0, time_scale=0.5)
        assert [r.at_s for r in workload.requests] == [i / 2 for i in range(20)]
        assert workload.num_later == 480


def test_lines_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    lines = BURSTGPT.splitlines()
    mixed = "\n".join([lines[0], lines[2], lines[1], lines[4]])
    assert shape(replay(tmp_path, mixed)) == [(0.0, 472, 18), (40.0, 1087, 230), (114.0, 417, 276)]


def test_a_silent_trace_shares_what_is_declared(tmp_path: Path) -> None:
    rows = "".join(f"{i},m,{200 + i},10,0,x\n" for i in range(200))
    workload = replay(tmp_path, BURSTGPT.splitlines()[0] + "\n" + rows, base={"prefix_reuse": 0.4})
    assert workload.prefix_reuse == pytest.approx(0.4, abs=0.01)
    assert [r.input_tokens for r in workload.requests] == [200 + i for i in range(200)]
    assert workload.declared_prefix_reuse == 0.4


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "has the fields of no known trace: nothing"),
        ("a,b\n1,2\n", ":1: has the fields of no known trace: a, b"),
        ('{"a": 1}\n', ":1: has the fields of no known trace: a"),
        ("{\n", ":1: is no JSON"),
        (AZURE_2023.replace("396", "3x6"), ":3: ContextTokens: must be a number of at least 0, not '3x6'"),
        (AZURE_2023.replace("396", ""), ":3: ContextTokens: is missing"),
        (AZURE_2023.replace("396", "39.5"), ":3: ContextTokens: must be a whole number of tokens"),
        (AZURE_2023.replace("396", "20000000"), "a whole number of tokens, 10000000 at most"),
        (AZURE_2023.replace("396", "inf"), ":3: ContextTokens: must be a number"),
        (AZURE_2023.replace("396", "-4"), ":3: ContextTokens: must be a number of at least 0"),
        (AZURE_2023.replace(",109", ""), ":3: has 2 cells where the header has 3"),
        (AZURE_2023.replace("2023-11-16 18:15:50.9951690", "noon"), ":3: TIMESTAMP: must be a date and time"),
        (AZURE_2023.splitlines()[0], "holds no request that can be replayed"),
        (BURSTGPT.replace("45,C", "nan,C"), ":3: Timestamp: must be a number"),
        (MOONCAKE.replace("[46]", "[46, 47, 48]"), ":3: hash_ids: names 3 blocks of 512 tokens for a prompt of 512"),
        (MOONCAKE.replace("[46]", "46"), ":3: hash_ids: must be a list of whole numbers"),
        (MOONCAKE.replace("30535", '"x"', 1), ":2: timestamp: must be a number"),
        (MOONCAKE.replace("30535", "1e999", 1), ":2: timestamp: must be a number"),
        (MOONCAKE.replace("1300", "true"), ":2: input_length: must be a number"),
        (MOONCAKE + "[1]\n", ":4: must be an object"),
        (MOONCAKE + '{"timestamp": \n', ":4: is no JSON"),
        (SHAREGPT[:-3], "ends in the middle"),
        ("[", ":1: is no JSON, or ends in the middle"),
        ('[\n{"id": "a",\n "conversations": []},\n{"id": "b"}]', ":4: conversations: must be a list of turns"),
        ('[{"conversations": [{"from": "human"}]}]', ":1: conversations: must have from and value"),
        ("[\n}]", ":2: is no JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, content: str, expected: str) -> None:
    with pytest.raises((TraceError, ContractError)) as caught:
        replay(tmp_path, content)
    assert expected in str(caught.value) and "trace.txt" in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_bytes(AZURE_2023.encode().replace(b"396", b"\xff"))
    with pytest.raises(TraceError, match=r"trace\.txt:3: is not UTF-8"):
        replay(tmp_path, path)
    path = tmp_path / "requests.parquet"
    path.write_bytes(b"PAR1nonsense")
    with pytest.raises(ContractError, match="no readable Parquet"):
        replay(tmp_path, path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ContractError, match="no finished run"):
        replay(tmp_path, tmp_path / "empty")
    with pytest.raises(UsageError, match="no such file"):
        replay(tmp_path, tmp_path / "gone.csv")


@pytest.mark.parametrize("indent", [None, 1])
@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.recursive(
            st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=6
        )
    )
)
def test_a_json_list_is_read_element_by_element(
    tmp_path_factory: pytest.TempPathFactory, indent: int | None, values: list[Any]
) -> None:
    """As json.loads has it, wherever the pieces that are read end."""
    path = tmp_path_factory.mktemp("json") / "list.json"
    text = json.dumps(values, indent=indent)
    path.write_text(text, encoding="utf-8")
    for piece in (1, 7, 1 << 16):
        assert [v for _, v in json_array(path, piece=piece)] == values
    if indent:
        lines = [line for line, _ in json_array(path, piece=5)]
        rest = text.splitlines()
        assert all(json.dumps(v)[:1] == rest[n - 1].strip()[:1] for n, v in zip(lines, values, strict=True))


def test_the_memory_for_a_long_list_is_that_of_an_element(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[" + ",\n".join(json.dumps({"conversations": [], "n": i}) for i in range(5000)) + "]")
    found = iter(json_array(path, piece=512))
    assert [next(found)[0] for _ in range(3)] == [1, 2, 3]
    assert sum(1 for _ in found) == 4997
