"""Recorded traffic, replayed: when requests came, how long they were, what they shared. Never what they said."""
