"""Who computes what in the next step. Integers only: no torch, no asyncio, no clock."""
