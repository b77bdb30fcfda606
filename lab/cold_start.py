"""How long `inferloop serve` takes from its start to the first streamed token, everything in the page cache.

    python -m lab.cold_start --rounds 5

Bytecode is kept in a folder of its own, so that it is there for sure, as after an ordinary installation. Each round
starts a server, connects as soon as its port answers, sends a prompt of 16 token ids and stops the clock at
the first event with text in it. The first start is left out: it may fetch the model, pack its weights and compile
Python. Beside the time, the processor time that the server had used by then, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lab.servers import Running, running

_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Start:
    """Milliseconds since the process was started."""

    connected_ms: float
    token_ms: float
    cpu_ms: float


def measure(model: str, extra: list[str], bytecode: str) -> Start:
    """Start a server, get one token, stop it. `bytecode`: the folder where Python finds or leaves it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "inferloop", "serve", model, "--port", str(port), *extra]
    env = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    with running(command, env=env, quiet=True) as server, _connected(server, port) as connection:
        connected = time.perf_counter()
        connection.sendall(_request(model))
        _read_token(connection)
        token = time.perf_counter()
        cpu_s = _cpu_seconds(server.pid)
    return Start((connected - server.began) * 1e3, (token - server.began) * 1e3, cpu_s * 1e3)


def _connected(server: Running, port: int) -> socket.socket:
    while server.returncode is None:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(_POLL_S)
    raise SystemExit(f"the server ended with {server.returncode}")


def _request(model: str) -> bytes:
    asked = {"model": model, "prompt": list(range(100, 116)), "max_tokens": 4, "temperature": 0, "stream": True}
    body = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _read_token(connection: socket.socket) -> None:
    received = b""
    while b'"text":"' not in received.replace(b'"text":""', b""):
        piece = connection.recv(65536)
        if not piece:
            raise SystemExit(f"the server hung up after {received!r}")
        received += piece


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    options, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="inferloop-bytecode-") as bytecode:
        measure(options.model, extra, bytecode)
        starts = [measure(options.model, extra, bytecode) for _ in range(options.rounds)]
    for name in ("connected_ms", "token_ms", "cpu_ms"):
        values = sorted(getattr(start, name) for start in starts)
        print(f"{name:14s} median {statistics.median(values):6.0f}   {values[0]:.0f} .. {values[-1]:.0f}")


if __name__ == "__main__":
    main()
