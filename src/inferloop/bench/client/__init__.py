"""The load generator's own HTTP/1.1: connections, their pool, the bytes of requests, and a timer."""
