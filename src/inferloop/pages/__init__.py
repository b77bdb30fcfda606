"""How data is turned into HTML: rows in, text out. Pure."""
