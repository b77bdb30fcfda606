"""Where chat templates run: without the system, and without end neither in time nor in memory.

Jinja's sandbox keeps a template from the system. It does not keep a model's author from loops in loops in loops, or
from a text that doubles a hundred times, which would hold the server up or end it.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS = 1 << 23
"""Of a prompt, and of every text or list on the way to it."""
MAX_ROUNDS = 1_000_000
"""Of all loops and macros together: a thousand messages may be looked through again for each of them."""
_MAX_SIZE = 1_000_000
"""Of a number that says how wide, how many or how often."""
_MAX_NODES = 300_000
"""Of lists and objects in what is made into text."""
_MAX_BITS = 4096
_WIDTHS = re.compile(r"%[-+ #0]*(\d+)|\{[^{}]*?(\d+)[^{}]*?(\d*)\}|\.(\d+)[a-zA-Z}]")
"""Wherever a format says how wide something is to be."""
_OF_CONTAINERS = frozenset(
    (
        *("abs", "attr", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last"),
        *("length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "round", "select"),
        *("selectattr", "sort", "sum", "unique"),
    )
)
"""Filters that make no text, and no more than they are given."""
_UNBOUNDED = {"expandtabs"}


class TooMuchError(jinja2.TemplateError):
    """A template that would take more time or memory than any prompt needs."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Raises TooMuchError, while it renders, for what goes beyond the bounds. Rendered by `bounded`."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._of_thread = threading.local()
        self.globals.pop("lipsum", None)
        for name in self.filters.keys() - _OF_CONTAINERS:
            self.add_filter(name, self.filters[name])
        self.filters["join"] = _join
        self.finalize = _check_printed

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """In place of jinja's own, within the bounds."""
        self.filters[name] = _sized(name, function)

    def bounded(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        """The text that `template` gives."""
        self._of_thread.rounds = 0
        return self._joined(template.generate(**values))

    @property
    def tick(self) -> None:
        """Looked at in every round of a loop and by every macro; a call would cost ten times as much."""
        rounds = getattr(self._of_thread, "rounds", 0) + 1
        self._of_thread.rounds = rounds
        if rounds > MAX_ROUNDS:
            raise TooMuchError(f"it loops more than {MAX_ROUNDS} times")

    def joined(self, *parts: Any) -> str:
        """What the operator ~ does."""
        return self._joined(str(_check_printed(part)) for part in parts)

    def _joined(self, parts: Iterator[str]) -> str:
        kept, num = [], 0
        for part in parts:
            kept.append(part)
            num += len(part)
            if num > MAX_CHARS:
                raise TooMuchError(f"it makes a text of more than {MAX_CHARS} characters")
        return "".join(kept)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        bodies: list[Any] = list(tree.find_all((nodes.For, nodes.Macro)))
        for body in bodies:
            body.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("tick")).set_lineno(body.lineno))
        return _Concatenations().visit(tree)  # type: ignore[no-any-return]

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Jinja's own names, which a template's cannot be."""
        method = getattr(__obj, "__wrapped__", __obj)  # jinja puts a formatter of its own over `str.format`
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            _check_text(owner, name, (*args, *kwargs.values()))
        _check_sizes(args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNBOUNDED and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":  # what templates do most; two parts within the bound make no more than twice that
            made = left + right
            if isinstance(made, str | list | tuple):
                _check_length(_size(made))
            return made
        {"*": _check_times, "**": _check_power, "%": _check_format}[operator](left, right)
        return super().call_binop(context, operator, left, right)


class _Concatenations(NodeTransformer):
    """`a ~ b` as a call, because it cannot be intercepted."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", node.nodes).set_lineno(node.lineno)


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


def _sized(name: str, kept: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses to make what goes beyond the bounds."""

    @functools.wraps(kept)  # with the mark by which jinja knows what else it wants
    def checked(*args: Any, **kwargs: Any) -> Any:
        value, *others = [arg for arg in args if not isinstance(arg, nodes.EvalContext)]
        _check_printed(value)
        _check_sizes(args, kwargs)
        if isinstance(value, str):
            _check_text(value, name, (*others, *kwargs.values()))
        return kept(*args, **kwargs)

    return checked


@jinja2.pass_environment
def _join(environment: Sandbox, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's own, which knows no bound."""
    values = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    parts = (part for i, item in enumerate(values) for part in ((d, item) if i else (item,)))
    return environment.joined(*itertools.islice(parts, MAX_ROUNDS))


def _check_printed(value: Any) -> Any:
    """What is made into text must not be so deeply in itself that its text has no end. Returns it."""
    if isinstance(value, str) or not isinstance(value, list | tuple | dict):
        return value
    left, num, num_seen = [value], 0, 0
    while left:
        one, num_seen = left.pop(), num_seen + 1
        parts = (*one.keys(), *one.values()) if isinstance(one, dict) else one
        num += len(parts) + sum(len(part) for part in parts if isinstance(part, str))
        _check_length(num if num_seen < _MAX_NODES else MAX_CHARS + 1)
        left += (part for part in parts if isinstance(part, list | tuple | dict))
    return value


def _check_sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _MAX_SIZE:
            raise TooMuchError(f"it asks for {value if abs(value) < 10**20 else 'very many'} of something")


def _check_text(text: str, method: str, args: tuple[Any, ...]) -> None:
    """Before a text is made of another by a method or filter of this name."""
    if method in ("format", "format_map"):
        _check_widths(text)
        for arg in args:
            _check_printed(arg)
    if method == "replace" and len(args) >= 2:
        _check_length(text.count(str(args[0])) * len(str(args[1])))
    if method == "indent" and args and isinstance(args[0], int):
        _check_length(args[0] * (text.count("\n") + 1))
    if method == "join" and args and isinstance(args[0], list | tuple):
        _check_printed(args[0])
        _check_length(len(text) * len(args[0]))


def _check_widths(layout: str) -> None:
    _check_length(sum(int(width[:9]) for found in _WIDTHS.findall(layout) for width in found if width))


def _check_times(left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(many, str | bytes | list | tuple):
            _check_length(_size(many) * times)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
        raise TooMuchError("it multiplies numbers that are too large")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:
        raise TooMuchError("it raises a number to a power that is too large")


def _check_format(left: Any, right: Any) -> None:
    if isinstance(left, str):
        _check_widths(left)
        _check_printed(right)
        _check_sizes(right if isinstance(right, tuple) and "*" in left else (), {})


def _size(many: str | bytes | list[Any] | tuple[Any, ...]) -> int:
    """A list counts as a text of as many bytes."""
    return len(many) * (1 if isinstance(many, str | bytes) else 8)


def _check_length(num: int) -> None:
    if num > MAX_CHARS:
        raise TooMuchError(f"it makes something longer than {MAX_CHARS}")
