"""A tokenizer behind a URL."""

from __future__ import annotations

import json
import socket
import threading

from tests.waiting import PATIENCE_S

from inferloop.bench.codecs import HttpCodec


def test_a_connection_closed_while_idle_is_opened_anew() -> None:
    """The server answers each connection once and then closes it, though it said keep-alive."""
    body = json.dumps({"tokens": [1, 2]}).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = threading.Semaphore(0)

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    received = b""
                    while b'"prompt"' not in received:
                        received += connection.recv(65536)
                    connection.sendall(answer)
                closed.release()

        thread = threading.Thread(target=serve)
        thread.start()
        codec = HttpCodec(f"http://127.0.0.1:{listener.getsockname()[1]}", "m")
        for _ in range(2):
            assert codec.encode_text("x") == (1, 2)
            assert closed.acquire(timeout=PATIENCE_S)
        codec.close()
        thread.join(PATIENCE_S)
