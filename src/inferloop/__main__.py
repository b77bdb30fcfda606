"""`inferloop` and `python -m inferloop`. Importing the verbs takes a moment, and Ctrl-C must end that in order too."""

import gc
import sys


def main() -> None:
    gc.disable()  # what importing makes stays; looking through it again and again is a tenth of the time it takes
    try:
        from inferloop.cli.main import run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
