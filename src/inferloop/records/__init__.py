"""Durable artefacts, versioned. Runs are files, so any stage can be repeated alone from disk."""
