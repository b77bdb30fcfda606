"""What Python and the extension must agree on, as numbers that the build compiles in (CMakeLists.txt reads this file).

An extension that was built from older sources has others, and is refused before it computes anything.
"""

CALLS = 5
"""What is called, and which attributes of which Python objects C++ reads: count up when either side changes."""

LAYOUT = 1
"""What cpp/types.h and packed.py describe: count up with every change, also because caches hold packed models."""

ARITHMETIC = 2
"""Count up when the same step gives other bits."""

REVISIONS = f"{CALLS}.{LAYOUT}.{ARITHMETIC}"
