"""The torch runner: the reference for every other runner, and the way to CUDA."""
