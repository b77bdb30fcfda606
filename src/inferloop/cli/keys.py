"""The API keys that a server of ours asks for: from a variable or a file, never from the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from inferloop.cli.common import stderr
from inferloop.core.api_keys import KEY_VARIABLE, keys_in_file, keys_in_variable
from inferloop.core.errors import UsageError
from inferloop.core.secret import Secret


def _refuse(text: str | None) -> None:
    """vLLM's flag. A warning would come too late: who lists processes has seen the key by then, and so has the shell's
    history."""
    if text is not None:
        raise typer.BadParameter(
            f"everybody on this machine could read it there: put it into {KEY_VARIABLE}, or into a file that "
            "--api-key-file names"
        )


KeyOption = Annotated[str | None, typer.Option("--api-key", hidden=True, callback=_refuse)]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        help=f"Answer only who has one of the API keys in this file, one on each line; default: those in "
        f"{KEY_VARIABLE}, with commas between them; without either, everybody.",
        show_default=False,
    ),
]


def server_keys(file: Path | None) -> tuple[Secret, ...]:
    """Those in `file`, else those in the variable; none when there is neither. Raises UsageError for what is no key,
    and for an empty variable: it was meant to hold one."""
    if file is not None:
        return keys_in_file(file)
    text = os.environ.get(KEY_VARIABLE)
    if text is None:
        return ()
    if not text.strip():
        raise UsageError(f"{KEY_VARIABLE} is set and empty; unset it to answer everybody")
    return keys_in_variable(text, KEY_VARIABLE)


def warn_of_open_door(host: str, port: int) -> None:
    """For a server that asks for no key."""
    from inferloop.backends.endpoint import is_loopback

    if not is_loopback(host):
        shown = f"[{host}]" if ":" in host else host
        told = f"warning: {shown}:{port} answers everybody who reaches it, because no API key was set"
        stderr.print(f"{told} ({KEY_VARIABLE} or --api-key-file does)", markup=False)
