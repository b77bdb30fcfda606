"""What may stand after --target."""

from __future__ import annotations

import pytest

from inferloop.cli.wire import is_url
from inferloop.core.errors import UsageError


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://api.example.org/v1/", "http://[::1]:80"])
def test_urls(url: str) -> None:
    assert is_url(url)


@pytest.mark.parametrize("name", ["embedded", "localhost:8000", "", "ftp://x"])
def test_names(name: str) -> None:
    assert not is_url(name)


@pytest.mark.parametrize(
    "broken", ["http://", "http://h:port", "http://h:99999", "http://a b", "http://[::1", "https:///x"]
)
def test_half_a_url_is_told(broken: str) -> None:
    with pytest.raises(UsageError, match="not a complete URL"):
        is_url(broken)
