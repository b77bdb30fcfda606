"""Events in, decisions out: no I/O, no asyncio, injected clock."""
