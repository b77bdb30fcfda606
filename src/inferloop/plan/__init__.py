"""Pure calculators, checkable by hand."""
