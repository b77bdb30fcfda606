"""Model files: find, fetch, verify, read headers; and the serving identity."""
