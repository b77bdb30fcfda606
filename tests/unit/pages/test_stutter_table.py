from __future__ import annotations

from inferloop.pages.points import stutter_table

SEEN = {
    "stall_ms": 250.0,
    "num_answers": 143,
    "gap_share": 0.01,
    "num_gaps_median": 200,
    "expected": 0.866,
    "observed": 0.25,
}


def test_expected_and_observed_stand_side_by_side() -> None:
    page = stutter_table([{"mode": "open", "offered_qps": 2.0, "stutter": SEEN}, {"mode": "serial", "stutter": None}])
    assert page is not None
    assert "pauses of more than 250 ms" in page
    assert "open, 2/s" in page and "86.6 %" in page and "25 %" in page
    assert "serial" not in page


def test_a_record_without_it_has_no_table() -> None:
    assert stutter_table([{"mode": "open"}]) is None
