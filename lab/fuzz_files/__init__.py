"""Damaged and hostile model files, against everything that reads them."""

KINDS = ("gguf", "directory", "torch", "adapter")
