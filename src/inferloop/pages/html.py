"""HTML as values. Text is escaped on its way in, so nothing a user named can become markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

Child = Markup | str | int | float | None
_VOID = frozenset({"meta", "br", "hr", "input"})


def tag(name: str, /, *children: Child | Iterable[Child], **attributes: str | int | float | bool | None) -> Markup:
    """`<name attributes>children</name>`. None and False attributes are left out, True ones stand alone; a trailing
    underscore is dropped and others become hyphens (`class_`, `aria_label`). Text that is not Markup is escaped."""
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        parts.append(f" {attribute}" if value is True else f' {attribute}="{escape(value)}"')
    opened = Markup("".join(parts) + ">")
    return opened if name in _VOID else opened + join(children) + Markup(f"</{name}>")


def join(children: Iterable[Child | Iterable[Child]]) -> Markup:
    """Children one after another; None is nothing."""
    out = Markup()
    for child in children:
        if child is None:
            continue
        if isinstance(child, str | int | float):
            out += escape(child)
        else:
            out += join(child)
    return out


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column; numbers are set to the right, sentences keep room to be read on a phone."""

    title: str
    numeric: bool = False
    wide: bool = False

    @property
    def css_class(self) -> str | None:
        return "num" if self.numeric else "wide" if self.wide else None


Row = Sequence[Child]


def table(caption: str, columns: Sequence[Column], rows: Sequence[Row], *, hide_caption: bool = False) -> Markup:
    """A table whose first column heads its row."""
    return grouped_table(caption, columns, [(None, rows)], hide_caption=hide_caption)


def grouped_table(
    caption: str,
    columns: Sequence[Column],
    groups: Sequence[tuple[str | None, Sequence[Row]]],
    *,
    hide_caption: bool = False,
) -> Markup:
    """A table of several (title, rows), in a box that scrolls sideways by keyboard too."""
    head = tag("tr", [tag("th", c.title, scope="col", class_=c.css_class) for c in columns])
    bodies = []
    for title, rows in groups:
        heading = tag("tr", tag("th", title, scope="rowgroup", colspan=len(columns), class_="group")) if title else None
        bodies.append(tag("tbody", heading, [_row(columns, row) for row in rows]))
    made = tag(
        "table",
        tag("caption", caption, class_="quiet" if hide_caption else None),
        tag("thead", head),
        bodies,
    )
    return tag("div", made, class_="scroll", role="region", aria_label=caption, tabindex=0)


def _row(columns: Sequence[Column], row: Row) -> Markup:
    first = tag("th", row[0], scope="row")
    rest = [tag("td", cell, class_=column.css_class) for column, cell in zip(columns[1:], row[1:], strict=True)]
    return tag("tr", first, rest)


def facts(pairs: Iterable[tuple[str, Child]]) -> Markup:
    """A list of names and values; pairs without a value are left out."""
    return tag(
        "dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value not in (None, "")]
    )


def section(anchor: str, title: str, *content: Child | Iterable[Child]) -> Markup:
    """A titled part of a page that links can reach."""
    return tag(
        "section",
        tag("h2", title, id=f"{anchor}-title"),
        *content,
        id=anchor,
        aria_labelledby=f"{anchor}-title",
    )
