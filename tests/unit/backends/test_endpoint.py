"""URLs, authorities and keys are judged before anything is sent."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from inferloop.backends.endpoint import Endpoint
from inferloop.bench.client.head import HeadWriter, new_base, request_id, trace_id
from inferloop.core.digest import plain
from inferloop.core.errors import EnvironmentLacksError, UsageError
from inferloop.core.secret import Secret

PEM = Path(__file__).parents[2] / "localhost.pem"
KEY = "sk-0123456789abcdef"


@pytest.mark.parametrize(
    ("url", "more", "what"),
    [
        ("ftp://x", {}, "not a complete URL"),
        ("http://", {}, "not a complete URL"),
        ("http://x:0", {}, "not a complete URL"),
        ("http://x:99999", {}, "not a complete URL"),
        ("http://bücher.example", {}, "ASCII"),
        ("http://x/a b", {}, "ASCII"),
        ("http://x/\n", {}, "ASCII"),
        ("http://x/#a", {}, "before its query"),
        ("http://x?key=1", {}, "before its query"),
        ("http://x", {"insecure": True}, "no certificate"),
        ("https://x", {"insecure": True, "ca_file": PEM}, "no certificate"),
        ("http://x", {"ca_file": PEM}, "not https"),
        ("https://x", {"api_key": Secret("a\r\nevil: 1")}, "characters"),
        ("https://x", {"api_key": Secret("schlüssel")}, "characters"),
        ("https://x", {"api_key": Secret("two words")}, "characters"),
    ],
)
def test_what_contradicts_itself_is_refused(url: str, more: dict[str, object], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        Endpoint(url, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", [f"https://me:{KEY}@x", f"https://me:{KEY}@x:port", f"https://x?key={KEY}"])
def test_a_url_that_holds_a_secret_is_refused_without_telling_it(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        Endpoint(url)
    assert KEY not in str(refused.value)


def test_a_missing_authority_is_named() -> None:
    with pytest.raises(UsageError, match=r"nowhere\.pem"):
        Endpoint("https://x", ca_file=Path("/nowhere.pem")).tls()
    with pytest.raises(UsageError, match="no certificates"):
        Endpoint("https://x", ca_file=Path(__file__)).tls()


def test_certificates_are_judged_unless_that_is_waived() -> None:
    strict, loose = Endpoint("https://x").tls(), Endpoint("https://x", insecure=True).tls()
    assert strict is not None
    assert loose is not None
    assert (strict.check_hostname, loose.check_hostname) == (True, False)
    assert Endpoint("http://x").tls() is None


def test_a_key_is_sent_and_never_shown() -> None:
    endpoint = Endpoint("https://example.org/base/", api_key=Secret(KEY))
    for shown in (repr(endpoint), str(endpoint), f"{endpoint.api_key}"):
        assert KEY not in shown
    payload = HeadWriter(endpoint, 5).write(3, "/v1/completions", b"{}")
    head, _, body = payload.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/v1/completions HTTP/1.1"
    assert b"host: example.org" in lines
    assert f"authorization: Bearer {KEY}".encode() in lines
    assert b"content-length: 2" in lines
    assert (body, (endpoint.host, endpoint.port, endpoint.is_tls)) == (b"{}", ("example.org", 443, True))


def test_no_record_can_be_made_of_a_key() -> None:
    endpoint = Endpoint("https://x", api_key=Secret(KEY))
    with pytest.raises(TypeError):
        json.dumps(plain(endpoint))
    with pytest.raises(TypeError):
        pickle.dumps(endpoint)


def test_a_quoted_key_is_taken_out_also_where_it_was_cut() -> None:
    endpoint = Endpoint("https://x", api_key=Secret(KEY))
    assert endpoint.redact(f"no {KEY}, no") == "no [secret], no"
    assert endpoint.redact(f"no {KEY[:9]}") == "no [secret]"
    assert endpoint.redact("no sk") == "no sk"
    assert endpoint.redact_bytes(f"{KEY}{KEY}".encode()) == b"[secret][secret]"
    assert Endpoint("https://x").redact("as it is") == "as it is"


@pytest.mark.parametrize(
    ("key", "status", "what"),
    [
        (None, 401, "asks for an API key .HTTP 401.*INFERLOOP_API_KEY"),
        (Secret(KEY), 401, "does not know the API key .HTTP 401"),
        (Secret(KEY), 403, "forbids this to the API key .HTTP 403"),
    ],
)
def test_a_closed_door_is_told_with_what_opens_it(key: Secret | None, status: int, what: str) -> None:
    with pytest.raises(EnvironmentLacksError, match=what):
        Endpoint("https://x", api_key=key).check_entry(status)
    Endpoint("https://x", api_key=key).check_entry(400)


def test_what_a_reader_should_know_of_the_connection() -> None:
    key = Secret(KEY)
    assert Endpoint("https://x", api_key=key).caveats == ()
    assert "not checked" in Endpoint("https://x", insecure=True).caveats[0]
    assert "unencrypted" in Endpoint("http://10.0.0.1", api_key=key).caveats[0]
    for near in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"):
        assert Endpoint(near, api_key=key).caveats == ()


@pytest.mark.parametrize(("url", "path"), [("http://x/v1/", ""), ("http://x/a/v1", "/a"), ("http://x/a", "/a")])
def test_the_path_ahead_of_v1_may_be_given_with_it_or_not(url: str, path: str) -> None:
    assert Endpoint(url).base_path == path


def test_ids_are_of_the_right_form_and_tell_requests_apart() -> None:
    base = new_base()
    traces = [trace_id(base, i) for i in range(20_000)]
    assert {len(t) for t in traces} == {32}
    assert len({request_id(t) for t in traces}) == len({t[16:] for t in traces}) == len(traces)
    head = HeadWriter(Endpoint("http://x"), base).write(7, "/", b"")
    assert f"traceparent: 00-{traces[7]}-{traces[7][16:]}-01".encode() in head
    assert f"x-request-id: {request_id(traces[7])}".encode() in head
