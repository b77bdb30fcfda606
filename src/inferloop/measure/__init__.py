"""The only definitions of numbers. Pure functions over values; no I/O."""
