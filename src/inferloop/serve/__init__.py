"""One replica over HTTP around a Generator."""
