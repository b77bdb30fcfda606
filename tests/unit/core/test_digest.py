from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from inferloop.core.digest import canonical_json, digest_of, file_digest


@dataclass(frozen=True)
class Pair:
    left: tuple[int, ...]
    right: dict[str, float]


def test_equal_values_have_equal_digests_whatever_their_order() -> None:
    assert digest_of({"a": 1, "b": [1, 2]}) == digest_of({"b": (1, 2), "a": 1})
    assert digest_of(Pair((1,), {"x": 0.5, "y": 2})) == digest_of({"right": {"y": 2, "x": 0.5}, "left": [1]})


def test_different_values_have_different_digests() -> None:
    assert digest_of({"a": 1}) != digest_of({"a": "1"})


def test_nan_has_no_canonical_form() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": float("nan")})


def test_file_digest_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert file_digest(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
