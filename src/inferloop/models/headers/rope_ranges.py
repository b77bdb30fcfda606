"""What the numbers of a rotary embedding can be, far beyond what any published model has. Within these bounds every
embedding is finite; outside of them a file is damaged, and is refused before its weights are read."""

from __future__ import annotations

THETA = (2.0, 1e15)
FACTOR = (0.01, 1e6)
"""How many times a context is stretched."""
BAND = (1e-3, 1e6)
"""Numbers of rotations that bound a band of dimensions."""
ATTENTION = (0.01, 100.0)
