"""One file per verb. `wire` alone picks implementations; `common` declares the options that the environment may set."""
