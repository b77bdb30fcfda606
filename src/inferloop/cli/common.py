"""What every verb shares: errors become one clear line and an exit code, results become a table or one JSON object."""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console

from inferloop.core.digest import plain
from inferloop.core.errors import InferloopError

P = ParamSpec("P")
T = TypeVar("T")

EXIT_INTERRUPTED = 130

JsonOption = Annotated[bool, typer.Option("--json", help="Print one machine-readable object on stdout.")]
CacheDirOption = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir", envvar="INFERLOOP_CACHE_DIR", help="Where models are cached; default: the user's cache."
    ),
]
CaFileOption = Annotated[
    Path | None,
    typer.Option(
        "--ca-file", help="Authorities to trust for https instead of the system's, as PEM.", show_default=False
    ),
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Take any certificate of an https target; the run says so.")
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="For a URL without vLLM's /tokenize: a model that has its tokenizer and chat template, by name, directory "
        "(weights are not needed) or .gguf file. Prompts are made with it; the target's own counts check it.",
        show_default=False,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(min=0, help="Same seed, same requests; default: a random one, which is told.", show_default=False),
]
RunsDirOption = Annotated[Path, typer.Option("--runs-dir", help="Where run folders are written.")]

_WIDTH = None if sys.stdout.isatty() else 140  # a pipe or a log has no width; tables must not be cut for it
stdout = Console(highlight=False, width=_WIDTH)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def is_interactive() -> bool:
    """Progress bars are drawn only for a person."""
    return sys.stderr.isatty()


def verb(function: Callable[P, None]) -> Callable[P, None]:
    """Turn our typed errors into a line on stderr and the documented exit code; Ctrl-C into 130.

    With `json_output=True` among the arguments every failure is also an object on stdout, our own faults too, so that
    a script always gets JSON.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        def failed(kind: str, message: str) -> None:
            if kwargs.get("json_output"):
                print_json({"error": {"type": kind, "message": message}})

        try:
            function(*args, **kwargs)
        except InferloopError as error:
            stderr.print(f"[bold red]error:[/] {_escape(str(error))}")
            failed(type(error).__name__, str(error))
            raise typer.Exit(error.exit_code) from None
        except (KeyboardInterrupt, asyncio.CancelledError) as interrupt:
            left = str(interrupt) or "interrupted"
            stderr.print(left, markup=False)
            failed("Interrupted", left)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except (typer.Exit, BrokenPipeError):
            raise
        except Exception as error:
            failed(type(error).__name__, str(error))
            raise

    return wrapper


def run_async(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run to completion on uvloop. SIGINT and SIGTERM both cancel `main`, so its cleanup runs; raises
    KeyboardInterrupt afterwards."""
    import uvloop

    interrupted = False

    async def cancellable() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            nonlocal interrupted
            if not interrupted:  # a second Ctrl-C must not cut the clean-up short; children die with us anyway
                interrupted = True
                task.cancel()

        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, interrupt)
        return await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(cancellable())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def chosen_seed(seed: int | None) -> int:
    """The one that was asked for, or a random one; told either way, so that a run can be repeated."""
    chosen = secrets.randbelow(2**31) if seed is None else seed
    stderr.print(f"seed {chosen}" + ("" if seed is not None else f" (--seed {chosen} sends the same requests)"))
    return chosen


def print_json(value: Any) -> None:
    """One object, one line, on stdout."""
    sys.stdout.write(json.dumps(plain(value), ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def _escape(text: str) -> str:
    return text.replace("[", "\\[")
