"""KV blocks outside the runner: in host memory, in a folder on disk, or both. See store.BlockStore."""
