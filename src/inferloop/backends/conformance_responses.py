"""The check of /v1/responses, for servers that offer it."""

from __future__ import annotations

from typing import Any

from inferloop.backends.conformance_target import RefusedCheckError, Target, require

RESPONSES = "/v1/responses"


async def check_responses(t: Target) -> None:
    """The joined deltas are the text of the same request without streaming; events are numbered, and end in order."""
    for given in ("Tell me about the sea.", [_message("Say hello.")]):
        body = {"temperature": 0, "max_output_tokens": 16, "input": given}
        await t.post(RESPONSES, body)  # so that the next ones find the same in a prefix cache, and round alike
        answer = await t.post(RESPONSES, body)
        if answer.status in (404, 405):
            raise RefusedCheckError(f"{RESPONSES} is not offered (HTTP {answer.status})")
        require(answer.status == 200, f"POST {RESPONSES}: HTTP {answer.status}: {answer.body[:300]!r}")
        whole = answer.json
        require(whole["object"] == "response", f"object is {whole['object']!r}")
        cut = (whole.get("incomplete_details") or {}).get("reason")
        status = "completed" if cut is None else "incomplete"
        require(whole["status"] == status, f"status {whole['status']!r} with the reason {cut!r}")
        usage = whole["usage"]
        require(usage["input_tokens"] > 0 < usage["output_tokens"], f"usage {usage}")
        require(usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], f"usage {usage}")
        require(bool(_text(whole)), "the answer is empty")
        await _check_stream(t, body, whole)


async def _check_stream(t: Target, body: dict[str, Any], whole: dict[str, Any]) -> None:
    events = (await t.stream(RESPONSES, body)).events
    numbers = [event["sequence_number"] for event in events]
    require(numbers == list(range(numbers[0], numbers[0] + len(events))), f"events are numbered {numbers}")
    require(events[0]["type"] == "response.created", f"the first event is {events[0]['type']}")
    last = events[-1]
    require(last["type"] == f"response.{whole['status']}", f"the last event is {last['type']}")
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    for name, text in (("deltas", deltas), ("the last event", _text(last["response"]))):
        require(text == _text(whole), f"{name} {text!r}, whole {_text(whole)!r}")
    counts = ("input_tokens", "output_tokens", "total_tokens")
    differs = [k for k in counts if last["response"]["usage"][k] != whole["usage"][k]]
    require(not differs, f"usage differs in {differs}: {last['response']['usage']} and {whole['usage']}")


def _message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


def _text(response: dict[str, Any]) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"] if part["type"] == "output_text")
