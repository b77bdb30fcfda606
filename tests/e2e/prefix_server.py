"""A small OpenAI server with a prefix cache and none of our code, which plays engines that bench.fresh_cache knows."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """`owner` is whose the models are. `lies` is added to what `usage` says. `busy_flushes`: how many requests to empty
    the cache are turned away at first. `delay_s` is how long each answer takes, by how many of its salt came before."""

    owner: str = "nobody"
    lies: dict[str, int] = field(default_factory=dict)
    status: int = 200
    busy_flushes: int = 0
    flushed_after: list[int] = field(default_factory=list)
    """The number of answers before each time that the cache was emptied."""
    delay_s: Callable[[str, int], float] | None = None
    salts: list[str | None] = field(default_factory=list)
    num_answers: int = 0
    num_of_salt: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    known: dict[Any, Any] = field(default_factory=dict)
    url: str = ""

    def look_up(self, ids: list[int], salt: str | None) -> int:
        """Tokens that an earlier prompt of the same salt began with; they are known from now on."""
        with self.lock:
            self.num_answers += 1
            self.salts.append(salt)
            node, cached = self.known.setdefault(salt if self.owner == "vllm" else None, {}), 0
            for token in ids[:-1]:
                cached += token in node
                node = node.setdefault(token, {})
            return cached


def tokens(body: dict[str, Any]) -> list[int]:
    """A word is a token; one more around each message and two at the end."""
    if "messages" not in body:
        text = body["prompt"]
    else:
        text = " ".join(f"<{m['role']}> {m['content']} </>" for m in body["messages"]) + " <assistant>"
    return [int.from_bytes(word.encode(), "big") % 1_000_003 for word in text.split()]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes
    behaviour: Behaviour

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"data": [{"id": "demo", "owned_by": self.behaviour.owner}]})
        else:
            self._json(404, {})

    def do_POST(self) -> None:
        b = self.behaviour
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/flush_cache" and b.owner == "sglang":
            with b.lock:
                b.busy_flushes -= 1
                if b.busy_flushes < 0:
                    b.known.clear()
                    b.flushed_after.append(b.num_answers)
            self._json(200 if b.busy_flushes < 0 else 400, {})
        elif self.path == "/tokenize":
            self._json(200, {"tokens": tokens(json.loads(data))})
        elif self.path == "/v1/chat/completions" and "messages" in (body := json.loads(data)):
            self._answer(body)
        else:
            self._json(404, {})

    def _answer(self, body: dict[str, Any]) -> None:
        b = self.behaviour
        if b.status != 200:
            self._json(b.status, {"error": {"message": "no"}})
            return
        ids = tokens(body)
        cached = b.look_up(ids, body.get("cache_salt"))
        if b.delay_s is not None:
            salt = body.get("cache_salt") or ""
            with b.lock:
                number = b.num_of_salt[salt]
                b.num_of_salt[salt] += 1
            time.sleep(b.delay_s(salt, number))
        said: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": {"content": " w"}}]} for _ in range(body["max_tokens"])
        ]
        usage = {
            "prompt_tokens": len(ids) + b.lies.get("prompt", 0),
            "completion_tokens": body["max_tokens"] + b.lies.get("completion", 0),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        said += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
        for event in said if "completion" in b.lies else ():
            event["inferloop"] = {"num_tokens": len(event["choices"]) and int("content" in str(event))}
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in said) + "data: [DONE]\n\n"
        self._send(200, "text/event-stream", text.encode())

    def _json(self, status: int, value: Any) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # of connections that come at once the rest would try again a second later
    daemon_threads = True


@contextlib.contextmanager
def prefix_server(**how: Any) -> Iterator[Behaviour]:
    behaviour = Behaviour(**how)
    handler = type("Handler", (_Handler,), {"behaviour": behaviour})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    behaviour.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield behaviour
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
