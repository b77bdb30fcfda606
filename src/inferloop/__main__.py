"""`inferloop` and `python -m inferloop`. Importing the verbs takes a moment, and Ctrl-C must end that in order too."""

import sys


def main() -> None:
    try:
        from inferloop.cli.main import run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
