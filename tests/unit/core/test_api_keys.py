"""Keys out of variables and files: what is none is told by its place, never by its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferloop.core.api_keys import keys_in_file, keys_in_variable
from inferloop.core.errors import UsageError
from inferloop.core.secret import Secret


@pytest.mark.parametrize(
    ("text", "keys"), [("a", ["a"]), (" a\n", ["a"]), ("a,b", ["a", "b"]), ("sk-1 ,\tsk~+/=2", ["sk-1", "sk~+/=2"])]
)
def test_a_variable_has_commas_between_keys(text: str, keys: list[str]) -> None:
    assert keys_in_variable(text, "KEYS") == tuple(map(Secret, keys))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "KEYS: an API key is empty"),
        (" \n", "KEYS: an API key is empty"),
        ("hush,", "KEYS, key 2: an API key is empty"),
        ("hush,,hush", "KEYS, key 2: an API key is empty"),
        ("hush hush", "KEYS: an API key is printable ASCII"),
        ("hush\nhush", "KEYS: an API key is printable ASCII"),
        ("ok,hush\thush", "KEYS, key 2: an API key is printable ASCII"),
        ("hush\u00e9", "KEYS: an API key is printable ASCII"),
        ("hush\x7f", "KEYS: an API key is printable ASCII"),
    ],
)
def test_what_is_no_key_is_refused_untold(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        keys_in_variable(text, "KEYS")
    assert "hush" not in str(refused.value)


def test_a_file_has_a_key_on_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"# of the desk\r\nsk-1\r\n\n  sk-2\n#sk-0\nsk-3")
    assert keys_in_file(file) == (Secret("sk-1"), Secret("sk-2"), Secret("sk-3"))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "holds no API key"),
        (b"\n# nobody\n", "holds no API key"),
        (b"sk-1\nhush hush\n", "keys:2: an API key is printable ASCII"),
        (b"hush,hush\n", "keys:1: an API key is printable ASCII"),
        (b"\xef\xbb\xbfhush\n", "keys:1: an API key is printable ASCII"),
        (b"\xff\n", "keys:1: an API key is printable ASCII"),
    ],
)
def test_what_of_a_file_is_no_key_is_told_by_its_line(tmp_path: Path, data: bytes, says: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(data)
    with pytest.raises(UsageError, match=says) as refused:
        keys_in_file(file)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("path", ["/no/such/keys", "/", "/dev/zero"])
def test_a_file_that_cannot_be_one_is_named(path: str) -> None:
    with pytest.raises(UsageError, match=f"^{path}: API keys"):
        keys_in_file(Path(path))
