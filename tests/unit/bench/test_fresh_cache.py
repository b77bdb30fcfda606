"""Salts keep the parts of a run apart, and are of the letters that every server takes."""

from __future__ import annotations

import re

from inferloop.backends.http import HttpClient
from inferloop.bench.fresh_cache import FreshCache


def test_a_salt_is_what_vllm_takes_and_each_part_has_its_own() -> None:
    fresh = FreshCache(HttpClient("http://127.0.0.1:1"), "vllm")
    parts = ("versus/A/8/1", "versus/A/8/2", "self/A1/0.5/1", "rate-12", "a@b\\c\0")
    salts = [fresh.fields(part)["cache_salt"] for part in parts]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,128}", salt) for salt in salts), salts
    assert len(set(salts)) == len(parts)
    assert FreshCache(HttpClient("http://127.0.0.1:1"), "vllm").fields(parts[0])["cache_salt"] not in salts


def test_others_get_no_salt() -> None:
    for owner in ("sglang", None, "openvino"):
        assert FreshCache(HttpClient("http://127.0.0.1:1"), owner).fields("x") == {}
