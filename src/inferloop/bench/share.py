"""What one sender has to send, in columns, and how it gets there: in parts, so that no second copy is ever whole."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from inferloop.bench.plan import NONE, Steps

if TYPE_CHECKING:  # a sender has no use for all that rendering brings along
    from inferloop.bench.render import RenderedRequest

_PART_REQUESTS = 4096
_PART_BYTES = 1 << 20


class Part(msgspec.Struct, tag="part", array_like=True):
    """Some requests of a share, in order: columns of numbers as an array's bytes. Paths and bodies that several have in
    common are there once."""

    positions: bytes
    at_ns: bytes
    after: bytes
    session: bytes
    path_of: bytes
    body_of: bytes
    paths: list[str]
    bodies: list[bytes]


class Share:
    """Requests by their place in the share. `positions` are those in the whole plan; `steps.after` are places here.

    A body is forgotten when it is taken: a long prompt is kept no longer than it is needed.
    """

    __slots__ = ("_bodies", "_paths", "positions", "steps")

    def __init__(self) -> None:
        self.positions = array("i")
        self.steps = Steps()
        self._paths: list[str] = []
        self._bodies: list[bytes] = []

    def __len__(self) -> int:
        return len(self.positions)

    def append(self, part: Part) -> None:
        self.positions.frombytes(part.positions)
        self.steps.at_ns.frombytes(part.at_ns)
        self.steps.after.frombytes(part.after)
        self.steps.session.frombytes(part.session)
        for numbers, values, column in (
            (part.path_of, part.paths, self._paths),
            (part.body_of, part.bodies, self._bodies),
        ):
            column += map(values.__getitem__, memoryview(numbers).cast("i"))  # type: ignore[operator]

    def take(self, place: int) -> tuple[int, str, bytes]:
        """(position, path, body), once."""
        body = self._bodies[place]
        self._bodies[place] = b""
        return self.positions[place], self._paths[place], body


def parts(requests: Sequence[RenderedRequest], steps: Steps, places: Sequence[int]) -> Iterator[Part]:
    """The requests at `places` of the plan; a request that follows another comes with it or later."""
    place_in_share = array("i", bytes(4 * len(steps)))
    for own, place in enumerate(places):
        place_in_share[place] = own
    start = 0
    while start < len(places):
        positions, at_ns, after, session = array("i"), array("q"), array("i"), array("i")
        path_of, body_of = array("i"), array("i")
        paths: dict[str, int] = {}
        bodies: dict[int, int] = {}  # by identity: telling apart is cheap, and the plan keeps them alive
        found: list[bytes] = []
        num_bytes = 0
        while start < len(places) and len(positions) < _PART_REQUESTS and num_bytes < _PART_BYTES:
            place = places[start]
            request, before = requests[place], steps.after[place]
            positions.append(place)
            at_ns.append(steps.at_ns[place])
            after.append(NONE if before == NONE else place_in_share[before])
            session.append(steps.session[place])
            path_of.append(paths.setdefault(request.path, len(paths)))
            number = bodies.setdefault(id(request.body), len(found))
            if number == len(found):
                found.append(request.body)
                num_bytes += len(request.body)
            body_of.append(number)
            start += 1
        yield Part(
            positions.tobytes(),
            at_ns.tobytes(),
            after.tobytes(),
            session.tobytes(),
            path_of.tobytes(),
            body_of.tobytes(),
            list(paths),
            found,
        )
