"""One file per inference engine. An engine's quirks stay in its file."""
