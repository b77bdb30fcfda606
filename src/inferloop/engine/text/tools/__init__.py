"""Tools: definitions in, calls out, in the ways in which models write them."""
