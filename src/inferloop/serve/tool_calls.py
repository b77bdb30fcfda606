"""One choice of a chat taken apart, and its parts as messages and chunks show them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET

from inferloop.backends.protocols import Delta
from inferloop.core.ids import new_id
from inferloop.engine.text.answer import AnswerParts, AnswerPlan, AnswerReader
from inferloop.engine.text.tools.calls import ToolCall
from inferloop.serve.reasoning import ReasoningTokens
from inferloop.serve.replies import AnswerCall, AnswerFunction, AssistantMessage, Finish

_dumps = msgspec.json.encode


class ChoiceReader:
    """`read` its deltas, to the last; then either the deltas are shown as they come, or `message` in the end."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._plan, self._reader = plan, AnswerReader(plan)
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: list[ToolCall] = []
        self._num_shown = 0
        self._thinking = ReasoningTokens()

    @property
    def num_reasoning_tokens(self) -> int:
        return self._thinking.num

    def read(self, delta: Delta) -> list[AnswerParts]:
        """What became clear with this delta; keeps it for `message`."""
        found = [self._reader.push(delta.text)]
        if delta.finish_reason is not None:
            found.append(self._reader.finish())
        for parts in found:
            self._reasoning.append(parts.reasoning)
            self._text.append(parts.text)
            self._calls += parts.calls
        self._thinking.add(found, len(delta.token_ids), answering=self._reader.answering)
        return found

    def finish(self, finish: Finish) -> Finish:
        """Why the choice ended, as OpenAI tells it: calls that the model chose to make are a reason of their own."""
        return "tool_calls" if finish == "stop" and self._calls and not self._plan.named else finish

    def message(self) -> AssistantMessage:
        reasoning, text = "".join(self._reasoning), "".join(self._text)
        return AssistantMessage(
            content=text if text or not (reasoning or self._calls) else None,
            reasoning_content=reasoning or UNSET,
            tool_calls=[_answer_call(call) for call in self._calls] or UNSET,
        )

    def show(self, parts: AnswerParts) -> Iterator[bytes]:
        """The `delta` objects of a stream. The first one of a call has its id and name, the next its arguments."""
        if parts.reasoning:
            yield b'{"reasoning_content":%b}' % _dumps(parts.reasoning)
        for event in parts.events:
            if isinstance(event, str):
                yield b'{"content":%b}' % _dumps(event)
                continue
            call, index = _answer_call(event), self._num_shown
            self._num_shown += 1
            arguments, call.function.arguments = call.function.arguments, ""
            yield b'{"tool_calls":[{"index":%d,%b]}' % (index, _dumps(call)[1:])
            yield b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, _dumps(arguments))


def _answer_call(call: ToolCall) -> AnswerCall:
    return AnswerCall(
        id=new_id("call").replace("-", "_"), function=AnswerFunction(name=call.name, arguments=call.arguments)
    )
