"""All ranks but the first, as the first one sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from inferloop.core.errors import EngineError, InferloopError, LaunchError
from inferloop.engine.compute.torch.parallel.link import Link
from inferloop.engine.compute.torch.parallel.messages import Failed, FromRank, ToRank, decode_from_rank, encode

T = TypeVar("T", bound=FromRank)


class Ranks:
    """The lines to ranks 1, 2, ... of a replica. `lost` is set when they cannot go on, to the error that tells why, and
    then nothing else of them can be used."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = links
        self.size = len(links) + 1
        self.lost: Future[InferloopError] = Future()

    def send(self, message: ToRank) -> None:
        """To all. Raises OSError when one is gone."""
        data = encode(message)
        for link in self.links:
            link.send(data)

    def send_each(self, messages: Sequence[ToRank]) -> None:
        """Of `messages`, to each its own."""
        for link, message in zip(self.links, messages, strict=True):
            link.send(encode(message))

    def expect(self, kind: type[T], timeout_s: float) -> list[T]:
        """The next word of each. Raises LaunchError for a rank that fails, ends, or is silent for so long."""
        return [self._expect(rank, kind, timeout_s) for rank in range(1, self.size)]

    def _expect(self, rank: int, kind: type[T], timeout_s: float) -> T:
        who = f"rank {rank} of {self.size}"
        try:
            said = decode_from_rank(self.links[rank - 1].receive(timeout_s))
        except TimeoutError:
            raise LaunchError(f"{who} did not get ready within {timeout_s:g} s") from None
        except OSError:
            raise LaunchError(f"{who} ended before it was ready") from None
        if isinstance(said, Failed):
            raise LaunchError(f"{who} cannot start: {said.text}")
        assert isinstance(said, kind), f"{said} instead of {kind.__name__}"
        return said

    def last_word(self, rank: int) -> str | None:
        """Of a rank that has ended: why, where it could still say so."""
        try:
            said = decode_from_rank(self.links[rank - 1].receive(0.1))
        except OSError:
            return None
        return f"{said.kind}: {said.text}" if isinstance(said, Failed) else None

    def lose(self, error: InferloopError) -> None:
        """The first reason counts. Any thread."""
        with contextlib.suppress(InvalidStateError):
            self.lost.set_result(error)

    def lost_by(self, problem: Exception, patience_s: float = 2.0) -> InferloopError:
        """What a failed step comes to: a rank that has died is told by whoever watches processes, a moment later than
        the broken connection is."""
        try:
            return self.lost.result(patience_s)
        except TimeoutError:
            self.lose(EngineError(f"the {self.size} ranks cannot go on: {problem}"))
            return self.lost.result()

    def close(self) -> None:
        """They end. Idempotent."""
        for link in self.links:
            link.close()
