"""Tokens in, tokens out. No HTTP."""
