"""`python -m inferloop`: the same as the `inferloop` command, for launches that must not depend on PATH."""

from inferloop.cli.main import run

run()
