"""Top-1 agreement, KL and perplexity against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from lab.peers.quality import Told
from lab.quality import Text, distance, table

TRUTH = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))


def test_the_truth_is_no_distance_from_itself() -> None:
    found = distance(TRUTH + 7, TRUTH, [0, 1])  # a constant changes no distribution
    assert found.top1 == 1.0 and found.kl == pytest.approx(0.0, abs=1e-6)
    assert found.perplexity == pytest.approx(4.0)  # token 1 came after token 0, and had one chance in four


def test_another_distribution() -> None:
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32))
    found = distance(other, TRUTH, [0, 1])
    assert found.top1 == 0.5
    assert found.kl == pytest.approx((0.5 * math.log(2) + 0.25 * math.log(0.5)) / 2, rel=1e-5)
    assert found.perplexity == pytest.approx(2.0)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not all of them numbers"):
        distance(np.full_like(TRUTH, np.nan), TRUTH, [0, 1])
    with pytest.raises(ValueError, match="shape"):
        distance(TRUTH[:1], TRUTH, [0, 1])


def test_one_row_for_each_class() -> None:
    found = distance(TRUTH, TRUTH, [0, 1])
    text = table([Told("4-bit", "peer", "a", (found,))], [Text("page", [0, 1])])
    assert text.splitlines()[0] == "| class | top-1 | KL | page top-1 | page KL | page perplexity |"
    assert text.splitlines()[2] == "| peer, 4-bit, a | 1.0000 | 0.0000 | 1.000 | 0.0000 | 4.000 |"
