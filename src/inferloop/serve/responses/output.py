"""The output items of one response as they come about: reasoning, messages and calls, in the order of the answer.

What is kept for the whole answer and what a stream tells of it come from the same steps, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from inferloop.core.ids import new_id
from inferloop.engine.text.answer import AnswerParts
from inferloop.engine.text.tools.calls import ToolCall
from inferloop.serve.replies import ChatLogprob
from inferloop.serve.responses.replies import (
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    Reasoning,
    ReasoningText,
)

Event = tuple[str, dict[str, Any]]
"""Its type and its other fields; the number is given when it is sent."""
Kind = Literal["message", "reasoning"]
_DELTA = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


@dataclass(slots=True)
class _Open:
    """The text item that is being written, the last of all."""

    kind: Kind
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)

    def part(self) -> OutputText | ReasoningText:
        text = "".join(self.texts)
        return OutputText(text=text, logprobs=self.logprobs) if self.kind == "message" else ReasoningText(text=text)

    def item(self, status: ItemStatus) -> OutputItem:
        part = self.part()
        if isinstance(part, OutputText):
            return OutputMessage(id=self.id, status=status, content=[part])
        return Reasoning(id=self.id, status=status, content=[part])


def _rows_from(rows: list[ChatLogprob], text: str) -> list[ChatLogprob]:
    """Those from the last that begin `text`: before are those of the reasoning or the call before it, and of the tags
    around them."""
    before = b"".join(bytes(row.bytes) for row in rows).rfind(text.encode())
    num = 0
    while before >= 0 and num < len(rows) and before >= len(rows[num].bytes):
        before -= len(rows[num].bytes)
        num += 1
    return rows[num:]


class Output:
    """Mutated by `add` and `close`, which tell the events of a stream; `items` are the closed ones."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._open: _Open | None = None
        self._rows: list[ChatLogprob] = []

    def add(self, parts: AnswerParts, rows: Sequence[ChatLogprob] = ()) -> list[Event]:
        """`rows` are of the tokens that brought these parts; they wait for the next text of a message."""
        self._rows += rows
        events = self._write("reasoning", parts.reasoning) if parts.reasoning else []
        for piece in parts.events:
            events += self._write("message", piece) if isinstance(piece, str) else self._call(piece)
        return events

    def close(self, status: ItemStatus) -> list[Event]:
        """End the item that is open. An answer that is nothing at all is an empty message."""
        events: list[Event] = []
        if self._open is None and not self.items:
            events += self._begin("message")
        if self._open is not None and self._open.kind == "message" and self._rows:
            events += self._write("message", "")
        return events + self._end(status)

    def so_far(self) -> list[OutputItem]:
        """All items, the open one as it is."""
        return self.items if self._open is None else [*self.items, self._open.item("incomplete")]

    def _write(self, kind: Kind, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events = self._end("completed") + self._begin(kind)
            if kind == "message" and self.items:
                self._rows = _rows_from(self._rows, text)
        opened = self._open
        assert opened is not None
        opened.texts.append(text)
        fields = {**self._place(opened.id), "content_index": 0, "delta": text}
        if kind == "message":
            fields["logprobs"], self._rows = self._rows, []
            opened.logprobs += fields["logprobs"]
        events.append((f"{_DELTA[kind]}.delta", fields))
        return events

    def _begin(self, kind: Kind) -> list[Event]:
        opened = _Open(kind, new_id("msg_" if kind == "message" else "rs_"))
        self._open = opened
        bare = opened.item("in_progress")
        assert not isinstance(bare, FunctionCall)
        bare.content = []
        return [
            ("response.output_item.added", {"output_index": len(self.items), "item": bare}),
            ("response.content_part.added", {**self._place(opened.id), "content_index": 0, "part": opened.part()}),
        ]

    def _end(self, status: ItemStatus) -> list[Event]:
        opened, self._open = self._open, None
        if opened is None:
            return []
        part, place = opened.part(), {**self._place(opened.id), "content_index": 0}
        told: dict[str, Any] = {"text": part.text}
        if isinstance(part, OutputText):
            told["logprobs"] = part.logprobs
        events: list[Event] = [
            (f"{_DELTA[opened.kind]}.done", place | told),
            ("response.content_part.done", place | {"part": part}),
        ]
        return [*events, self._done(opened.item(status))]

    def _call(self, call: ToolCall) -> list[Event]:
        events = self._end("completed")
        done = FunctionCall(
            id=new_id("fc_"), call_id=new_id("call_"), name=call.name, arguments=call.arguments, status="completed"
        )
        bare = FunctionCall(id=done.id, call_id=done.call_id, name=call.name, arguments="", status="in_progress")
        place = self._place(done.id)
        return [
            *events,
            ("response.output_item.added", {"output_index": len(self.items), "item": bare}),
            ("response.function_call_arguments.delta", place | {"delta": call.arguments}),
            ("response.function_call_arguments.done", place | {"arguments": call.arguments}),
            self._done(done),
        ]

    def _done(self, item: OutputItem) -> Event:
        self.items.append(item)
        return "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _place(self, item_id: str) -> dict[str, Any]:
        return {"item_id": item_id, "output_index": len(self.items)}
