"""Shared nouns. Standard library only; imports nothing else of the project."""
