"""URLs, authorities and keys are judged before any load."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferloop.bench.client.endpoint import Endpoint
from inferloop.bench.client.head import HeadWriter, new_base, request_id, trace_id
from inferloop.core.errors import UsageError

PEM = Path(__file__).with_name("localhost.pem")


@pytest.mark.parametrize(
    ("url", "more", "what"),
    [
        ("ftp://x", {}, "not an http"),
        ("http://", {}, "not an http"),
        ("http://x:0", {}, "not an http"),
        ("http://x:99999", {}, "not an http"),
        ("http://bücher.example", {}, "ASCII"),
        ("http://x/a b", {}, "ASCII"),
        ("http://x/\n", {}, "ASCII"),
        ("http://x/v1?key=1", {}, "'key=1' would not be sent"),
        ("http://x/#a", {}, "'a' would not be sent"),
        ("http://me:secret@x", {}, "a user's name would not be sent"),
        ("http://x", {"insecure": True}, "no certificate"),
        ("https://x", {"insecure": True, "ca_file": PEM}, "no certificate"),
        ("http://x", {"ca_file": PEM}, "not https"),
        ("https://x", {"api_key": "a\r\nevil: 1"}, "characters"),
        ("https://x", {"api_key": "schlüssel"}, "characters"),
    ],
)
def test_what_contradicts_itself_is_refused(url: str, more: dict[str, object], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        Endpoint(url, **more)  # type: ignore[arg-type]


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
    endpoint = Endpoint("https://example.org/base/", api_key="sk-secret")
    assert "sk-secret" not in repr(endpoint)
    payload = HeadWriter(endpoint, 5).write(3, "/v1/completions", b"{}")
    head, _, body = payload.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/v1/completions HTTP/1.1"
    assert b"host: example.org" in lines
    assert b"authorization: Bearer sk-secret" in lines
    assert b"content-length: 2" in lines
    assert (body, (endpoint.host, endpoint.port, endpoint.is_tls)) == (b"{}", ("example.org", 443, True))


def test_ids_are_of_the_right_form_and_tell_requests_apart() -> None:
    base = new_base()
    traces = [trace_id(base, i) for i in range(20_000)]
    assert {len(t) for t in traces} == {32}
    assert len({request_id(t) for t in traces}) == len({t[16:] for t in traces}) == len(traces)
    head = HeadWriter(Endpoint("http://x"), base).write(7, "/", b"")
    assert f"traceparent: 00-{traces[7]}-{traces[7][16:]}-01".encode() in head
    assert f"x-request-id: {request_id(traces[7])}".encode() in head
