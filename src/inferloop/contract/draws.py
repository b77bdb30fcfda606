"""Random numbers that are the same on every machine and in every version of numpy.

Only the raw words of the Philox-4x64 generator are used (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3"); its stream is fixed, while numpy's distributions may change between versions. Each purpose has its own
stream, keyed by a hash of its name, so that changing the arrival rate leaves every length as it was.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

_UNIT: float = 2.0**-53


class Draws:
    """One named stream of random numbers. Each call moves it forward."""

    def __init__(self, *names: str | int) -> None:
        key = int.from_bytes(hashlib.sha256(_joined(names)).digest()[:16], "little")
        self._philox = np.random.Philox(key=key)

    def uniform(self) -> float:
        """In (0, 1): the middle of one of 2^53 equal cells, so neither end is ever met."""
        word: int = self._philox.random_raw()
        return ((word >> 11) + 0.5) * _UNIT

    def exponential(self) -> float:
        """Mean 1, by inversion."""
        return -math.log(self.uniform())

    def normal(self) -> float:
        """Standard normal (Box and Muller 1958; one of the pair is used)."""
        radius = math.sqrt(2.0 * self.exponential())
        return radius * math.cos(2.0 * math.pi * self.uniform())

    def gamma(self, shape: float) -> float:
        """Scale 1 (Marsaglia and Tsang 2000, "A simple method for generating gamma variables")."""
        if shape < 1.0:
            return self.gamma(shape + 1.0) * math.pow(self.uniform(), 1.0 / shape)
        d = shape - 1.0 / 3.0
        c = 1.0 / math.sqrt(9.0 * d)
        while True:
            x = self.normal()
            v = (1.0 + c * x) ** 3
            if v > 0.0 and math.log(self.uniform()) < 0.5 * x * x + d - d * v + d * math.log(v):
                return d * v

    def order(self, count: int) -> list[int]:
        """A random permutation of 0 .. count-1."""
        words = self._philox.random_raw(count)
        return [int(i) for i in np.argsort(words, kind="stable")]

    def stratified(self, count: int) -> list[float]:
        """`count` uniforms, one in each of `count` equal strata, in random order.

        Each is uniform by itself, while together they follow the distribution closely even when they are few, so
        a short run has the declared percentiles (stratified sampling, the one-dimensional Latin hypercube).
        """
        return [(stratum + self.uniform()) / count for stratum in self.order(count)]


def seed_of(*names: str | int) -> int:
    """A number below 2^53 (exact as a double too) that stands for these names."""
    return int.from_bytes(hashlib.sha256(_joined(names)).digest()[:8], "little") >> 11


def _joined(names: tuple[str | int, ...]) -> bytes:
    return "\0".join(str(name) for name in names).encode()
