"""The native runner: one call into C++ per step, for CPUs."""
