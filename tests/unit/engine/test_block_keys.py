"""Names of blocks: equal only when everything that a block's content depends on is equal."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from inferloop.engine.schedule.keys import KEY_BYTES, block_key, namespace_key, root_key

ROOT = root_key("model a, bf16")
Case = tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...]]
CASES = st.tuples(
    st.sampled_from(["", "m", "mm"]),
    st.lists(st.sampled_from(["", "salt", "adapter", "x", "saltx", "x" * 40]), max_size=3).map(tuple),
    st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)


def key_of(case: Case) -> bytes:
    identity, namespace, blocks = case
    key = namespace_key(root_key(identity), namespace)
    for tokens in blocks:
        key = block_key(key, tokens)
    return key


@given(CASES, CASES)
def test_keys_are_equal_exactly_when_all_is(one: Case, other: Case) -> None:
    assert (key_of(one) == key_of(other)) == (one == other)


def test_an_adapter_and_a_salt_of_one_name_never_meet() -> None:
    names: list[tuple[str, ...]] = [(), ("salt", "x"), ("adapter", "x"), ("saltx",), ("salt", ""), ("salt", "x", "")]
    keys = {namespace_key(ROOT, name) for name in names}
    assert len(keys) == len(names)


def test_a_key_covers_what_comes_before() -> None:
    start = namespace_key(ROOT, ())
    ways = {block_key(block_key(start, a), b) for a, b in itertools.product([(1, 2), (2, 1)], repeat=2)}
    assert len(ways) == 4


def test_kinds_of_keys_cannot_stand_for_each_other() -> None:
    """A namespace whose name is the bytes of tokens is still no block."""
    name = "abcd"
    tokens = [int.from_bytes(name.encode(), "little")]
    assert namespace_key(ROOT, (name,)) != block_key(ROOT, tokens)
    assert root_key("abcd") != namespace_key(b"", ("abcd",))
    assert len(ROOT) == KEY_BYTES


def test_a_salt_may_be_any_string() -> None:
    assert namespace_key(ROOT, ("salt", "\ud800")) != namespace_key(ROOT, ("salt", "?"))
