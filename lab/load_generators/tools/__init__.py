"""One file for each load generator: how it is called, and where its results lie."""
