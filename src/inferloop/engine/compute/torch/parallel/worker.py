"""A rank other than the first, as a process: `python -m inferloop.engine.compute.torch.parallel.worker`.

Its standard input is the socket that the first rank tells it over what to do; when that closes, it ends.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys

from inferloop.core.errors import InferloopError
from inferloop.engine.compute.torch.parallel.link import Link
from inferloop.engine.compute.torch.parallel.messages import Failed, Job, decode_to_rank, encode


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # in a terminal it is for the first rank, which ends the others
    link = Link(socket.socket(fileno=sys.stdin.fileno()))
    try:
        # What takes longest comes before the first word, while the first rank does the same.
        from inferloop.engine.compute.torch.parallel.follow import follow

        while True:
            job = decode_to_rank(link.receive())
            assert isinstance(job, Job), "a step without a job"
            follow(link, job)
    except ConnectionError:
        return
    except Exception as error:
        with contextlib.suppress(OSError):
            link.send(encode(Failed(type(error).__name__, str(error))))
        if not isinstance(error, InferloopError):
            raise
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
