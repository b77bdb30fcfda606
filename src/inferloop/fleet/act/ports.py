"""Free ports, and who listens on one."""

from __future__ import annotations

import socket

import psutil

from inferloop.core.errors import PortInUseError

_reserved: set[int] = set()  # handed out and not yet given back: two replicas of one owner never get the same port


def reserve_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago and that this process has not handed out. Another program may still be
    faster; whoever launches on it must check `listens` and try again."""
    while True:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port not in _reserved:
            _reserved.add(port)
            return port


def release_port(port: int) -> None:
    """Idempotent."""
    _reserved.discard(port)


def bind_listener(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening; port 0 picks a free one. Raises PortInUseError when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol number is spelled out; with 0 every second write of
    # a kept-alive connection waits for a delayed acknowledgement, 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # only now is a listener on the same address noticed
    except OSError as error:
        listener.close()
        raise PortInUseError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            fix="Stop the program that uses it, or choose another port (0 picks a free one).",
        ) from error
    listener.setblocking(False)
    return listener


def listens(root_pid: int, port: int) -> bool:
    """Whether the process or one below it listens on the TCP port. False when the process is gone; True when the
    system does not let us look."""
    try:
        root = psutil.Process(root_pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return False
    for process in tree:
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            return True  # not ours to see; better to believe it than never to be ready
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
            return True
    return False
