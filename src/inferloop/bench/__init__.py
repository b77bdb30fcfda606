"""The measuring instrument: render, drive, search."""
