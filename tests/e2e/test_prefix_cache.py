"""What a client sees of the prefix cache of the real model."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

PREAMBLE = "You answer questions about the opening hours of a small library. It is open from Monday to Friday. "


def ask(url: str, question: str, **fields: Any) -> dict[str, Any]:
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "system", "content": PREAMBLE}, {"role": "user", "content": question}],
        "max_tokens": 8,
        "temperature": 0,
        **fields,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def counter(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and not line.startswith("#"))


def test_a_second_question_starts_from_the_shared_preamble(served_model: str) -> None:
    salt = "library-1"  # nobody else's questions in this process
    first = ask(served_model, "Is it open on Sunday?", cache_salt=salt)
    queries, hits = (counter(served_model, f"inferloop_prefix_cache_{n}_total") for n in ("queries", "hits"))
    second = ask(served_model, "When does it open?", cache_salt=salt)
    assert cached_tokens(first) == 0
    assert 16 <= cached_tokens(second) < second["usage"]["prompt_tokens"]
    asked = counter(served_model, "inferloop_prefix_cache_queries_total") - queries
    found = counter(served_model, "inferloop_prefix_cache_hits_total") - hits
    assert (asked, found) == (second["usage"]["prompt_tokens"], cached_tokens(second))


def test_a_repeated_question_computes_one_token_of_it_and_counts_the_rest_as_cached(served_model: str) -> None:
    first = ask(served_model, "Who may borrow books?", cache_salt="library-2")
    again = ask(served_model, "Who may borrow books?", cache_salt="library-2")
    assert cached_tokens(again) >= first["usage"]["prompt_tokens"] - 16
    assert again["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]


def test_tenants_do_not_share(served_model: str) -> None:
    question = "May I bring a dog?"
    ask(served_model, question, cache_salt="library-4")
    assert cached_tokens(ask(served_model, question, cache_salt="library-3")) == 0
