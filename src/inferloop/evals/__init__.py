"""Does it answer correctly? Suites, scorers and their runner."""
