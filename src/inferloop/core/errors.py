"""The one error tree. Users' mistakes and the environment's faults raise these; `assert` is for our own bugs.

InferloopError                 exit 1
  UsageError                   exit 2   wrong flags, bad files
    ContractError                       a contract that cannot mean anything; names file, line, key
      ContractProblemsError             several of them, found in one reading
      TraceError                        a recorded trace that cannot be replayed; names file, line, field
    RecordError                         a run folder that cannot be read
  EnvironmentLacksError        exit 3   something is missing here; says how to get it
    ModelFileError                      a model file that is absent, truncated, tampered with or unsupported
    PortInUseError
    LaunchError                         an engine that did not become ready; carries the end of its log
    RecordWriteError                    a record could not be written (disk full, no permission)
  RunVoidError                 exit 4   a self-check failed: the numbers must not be used
  RequestError                 HTTP 4xx  one request is wrong; names the parameter
    ContextLengthError
  OverloadedError              HTTP 503  come back later
  EngineError                  HTTP 500  our own fault, on one request or the whole engine
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InferloopError(Exception):
    """Root of every error that inferloop raises on purpose. `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(InferloopError):
    """The command, a flag or a file that the user gave is wrong."""

    exit_code = 2


class ContractError(UsageError):
    """A contract (or suite) that cannot be used. The text names file, line, key and the nearest valid name."""

    def __init__(
        self,
        problem: str,
        *,
        file: str | None = None,
        line: int | None = None,
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.problem, self.file, self.line, self.key, self.hint = problem, file, line, key, hint
        where = f"{file}:{line}" if file and line else (file or "contract")
        text = f"{where}: {key}: {problem}" if key else f"{where}: {problem}"
        super().__init__(f"{text} ({hint})" if hint else text)


class ContractProblemsError(ContractError):
    """Everything that is wrong with one file, one line per problem. It stands for its first problem too."""

    def __init__(self, problems: tuple[ContractError, ...]) -> None:
        assert problems, "an error needs a problem"
        first = problems[0]
        super().__init__(first.problem, file=first.file, line=first.line, key=first.key, hint=first.hint)
        self.problems = problems
        self.args = ("\n".join(str(p) for p in problems),)


class TraceError(ContractError):
    """A recorded trace that cannot be replayed. `key` is the field."""


class RecordError(UsageError):
    """A run folder that is missing, of a newer schema, or damaged beyond a torn last line."""


class EnvironmentLacksError(InferloopError):
    """Something this machine does not have. `fix` is what to do about it."""

    exit_code = 3

    def __init__(self, what: str, *, fix: str | None = None) -> None:
        self.what, self.fix = what, fix
        super().__init__(f"{what}. {fix}" if fix else what)


class ModelFileError(EnvironmentLacksError):
    """A model file that is missing, truncated, tampered with, or of a kind we cannot run."""


class PortInUseError(EnvironmentLacksError):
    """The address is taken by another process."""


class LaunchError(EnvironmentLacksError):
    """A launched engine exited or did not become ready. The text ends with the last lines of its log. `wrong_usage`: it
    says itself that it was given something wrong."""

    def __init__(self, what: str, *, wrong_usage: bool = False) -> None:
        super().__init__(what)
        if wrong_usage:
            self.exit_code = UsageError.exit_code


class RecordWriteError(EnvironmentLacksError):
    """A record could not be written. What was complete before is still there."""


class RunVoidError(InferloopError):
    """A self-check failed, so the numbers of the run must not be used."""

    exit_code = 4


class RequestError(InferloopError):
    """One request is wrong. `param` names the field, `code` is the OpenAI error code."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        self.message, self.param, self.code = message, param, code
        super().__init__(message)


class ContextLengthError(RequestError):
    """Prompt (plus what was asked for) does not fit the model's context."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class OverloadedError(InferloopError):
    """No room now. `retry_after_s` says when to come back; `reason` is the one word that metrics count by."""

    status = 503

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str = "overloaded") -> None:
        self.retry_after_s, self.reason = retry_after_s, reason
        super().__init__(message)


class EngineError(InferloopError):
    """The engine failed while serving; never the caller's fault."""

    status = 500


_LONGEST_NAME = 100
"""Of anything that has a name here; comparing takes long for texts."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to a misspelt one, or None when nothing is close."""
    if len(name) > _LONGEST_NAME:
        return None
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return found[0] if found else None
