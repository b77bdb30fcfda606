"""One file per verb. `wire` alone reads the environment and picks implementations."""
