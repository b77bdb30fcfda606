"""The torch runner: the reference for every other runner, and the way to CUDA.

Threads of torch's OpenMP spin at every barrier before they sleep. When the cores are shared with anybody (the HTTP
side, a second replica) the spinning steals the time that the awaited thread needs, and a step takes tens of times as
long. A short spin costs little alone and saves this; the library reads the setting once, so it is made before torch is
imported. Whoever sets GOMP_SPINCOUNT or OMP_WAIT_POLICY decides otherwise.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
