"""Pace, gate, forms: the small parts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.core.clock import VirtualClock
from inferloop.core.errors import RequestError
from inferloop.core.units import NS_PER_S
from inferloop.serve.batch import upload
from inferloop.serve.batch.gate import Gate
from inferloop.serve.batch.job import Pace
from inferloop.serve.batch.service import places_for_rows
from inferloop.serve.batch.upload import Form
from inferloop.serve.errors import BodyTooLargeError


def test_pace_is_that_of_the_last_minute() -> None:
    clock = VirtualClock()
    pace = Pace(clock)
    assert pace.rates() is None
    pace.begin()
    assert pace.rates() is None
    clock.advance(10 * NS_PER_S)
    pace.end(50)
    assert pace.rates() == (0.1, 5.0)  # over the ten seconds there were
    for _ in range(120):
        clock.advance(NS_PER_S // 2)
        pace.end(10)
    rows_per_s, tokens_per_s = pace.rates() or (0.0, 0.0)
    assert rows_per_s == pytest.approx(2.0, rel=0.02) and tokens_per_s == pytest.approx(20.0, rel=0.1)
    clock.advance(61 * NS_PER_S)
    assert pace.rates() is None  # nothing ended lately: no estimate rather than an old one


async def test_gate_holds_no_more_than_its_places() -> None:
    gate = Gate(4)
    await gate.enter(3)
    waiter = asyncio.create_task(gate.enter(2))
    await asyncio.sleep(0)
    assert not waiter.done()
    gate.leave(3)
    await waiter
    assert gate.num_inside == 2
    wide = asyncio.create_task(gate.enter(9))  # more than there is: alone
    await asyncio.sleep(0)
    assert not wide.done()
    gate.leave(2)
    await wide
    narrow = asyncio.create_task(gate.enter(1))
    await asyncio.sleep(0)
    narrow.cancel()
    await asyncio.gather(narrow, return_exceptions=True)
    assert gate.num_inside == 9


def test_places_fill_the_batch_and_what_may_wait() -> None:
    assert places_for_rows(32, 256) == 36
    assert places_for_rows(1, 256) == 2
    assert places_for_rows(32, 0) == 32


FORM = (
    b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--xyz\r\ncontent-disposition: form-data; name="file"; filename="a \xc3\xbc.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\nline 1\r\n--xy\r\nline 2\r\n--xyz--\r\n"
)


@given(st.lists(st.integers(0, len(FORM)), max_size=12))
def test_a_form_reads_the_same_however_it_is_cut(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    path = tmp_path_factory.mktemp("form") / "f"
    form = Form(b"xyz", path)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(FORM)], strict=True):
        form.feed(FORM[start:end])
    form.close()
    assert (form.fields, form.filename) == ({"purpose": "batch"}, "a ü.jsonl")
    assert path.read_bytes() == b"line 1\r\n--xy\r\nline 2" and form.num_bytes == 20


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (FORM[:-6], "closing boundary"),
        (b"", "closing boundary"),
        (b"nonsense", "cannot be read"),
        (FORM.replace(b'; name="purpose"', b""), "no name"),
        (FORM[:-4] + FORM[FORM.index(b"\r\n--xyz", 10) :].removeprefix(b"\r\n--xyz"), "one file"),
        (b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 9000, "too long"),
        (b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n' * 20 + b"--xyz--\r\n", "more than 16 parts"),
    ],
)
def test_broken_forms_are_refused(tmp_path: Path, body: bytes, says: str) -> None:
    form = Form(b"xyz", tmp_path / "f")
    with pytest.raises(RequestError, match=says):
        form.feed(body)
        form.close()
    form.drop()
    assert not (tmp_path / "f").exists()


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "MAX_FILE_BYTES", 10)
    form = Form(b"xyz", tmp_path / "f")
    with pytest.raises(BodyTooLargeError):
        form.feed(FORM)
    form.drop()
