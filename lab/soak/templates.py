"""The fixed pool of requests whose answers are known: greedy or seeded, every feature in at least one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
PREAMBLE = (
    "You are the friendly guide of a small museum of trains. You know everything about steam engines, signals, "
    "bridges and tunnels, and you answer in short sentences that children understand. "
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{what} of a train",
            "parameters": {"type": "object", "properties": {"train": {"type": "integer"}}, "required": ["train"]},
        },
    }
    for name, what in (("get_speed", "Speed"), ("get_length", "Length"))
]
ONE_TOOL = {"type": "function", "function": {"name": "get_length"}}


@dataclass(frozen=True, slots=True)
class Template:
    """A request without `model`, `stream` and what has no influence on the answer. `can_stream`, `takes_salt`: the
    endpoint has that field."""

    name: str
    path: str
    body: dict[str, Any]
    can_stream: bool = True
    takes_salt: bool = True


def _chat(name: str, question: str, *, can_stream: bool = True, **fields: Any) -> Template:
    messages = [{"role": "system", "content": PREAMBLE}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 32, "temperature": 0, **fields}
    return Template(name, CHAT, body, can_stream=can_stream)


def _completion(name: str, prompt: Any, **fields: Any) -> Template:
    return Template(name, COMPLETIONS, {"prompt": prompt, "max_tokens": 32, "temperature": 0, **fields})


def _response(name: str, asked: str, **fields: Any) -> Template:
    body = {"instructions": PREAMBLE, "input": asked, "max_output_tokens": 32, "temperature": 0, **fields}
    return Template(name, RESPONSES, body)


TEMPLATES = (
    _chat("greedy chat", "What pulls a train?", max_tokens=48),
    _chat("seeded chat", "Why are there tunnels?", temperature=0.9, top_p=0.9, seed=11),
    _chat("chat log-probabilities", "How fast is a train?", logprobs=True, top_logprobs=3),
    _chat("three seeded choices", "Name a bridge.", n=3, seed=5, temperature=1.0, max_tokens=24),
    _chat("stop strings", "Count to ten.", stop=["5", "five", "\n\n"]),
    _chat("unicode", "Repeat exactly: 삼겹살 김치 👩‍👩‍👧‍👦 ñandú 東京", max_tokens=40),
    _chat("penalties", "Tell me about signals.", temperature=0.7, seed=3, presence_penalty=0.5, frequency_penalty=0.4,
          repetition_penalty=1.1),
    _chat("logit bias", "Who drives a train?", logit_bias={"260": -100, "506": 3.5}),
    _chat("JSON schema", "Describe a train.", max_tokens=64, seed=8, temperature=0.8,
          response_format={"type": "json_schema", "json_schema": {"name": "train", "schema": SCHEMA}}),
    _chat("JSON object", "Describe a signal as JSON.", max_tokens=40, response_format={"type": "json_object"}),
    _completion("alphabet", "Here is the English alphabet: A B C D"),
    _completion("three echoed prompts", ["1 2 3 4", "Once upon a time", PREAMBLE], echo=True, max_tokens=12),
    _completion("token ids", [[504, 2365, 6354, 16438], [28, 216, 34]], max_tokens=24, n=2, seed=21, temperature=0.8),
    _completion("minimum length", PREAMBLE + "The first train", min_tokens=20, stop_token_ids=[30, 18], max_tokens=30),
    _completion("regex", "The date is ", structured_outputs={"regex": "20[0-9]{2}-[01][0-9]-[0-3][0-9]"}),
    _completion("grammar", "Colours: ", seed=4, temperature=1.0,
                structured_outputs={"grammar": 'start: COLOUR (", " COLOUR){2}\nCOLOUR: "red" | "green" | "blue"\n'}),
    _completion("long prompt", PREAMBLE * 4 + "So the guide says:", max_tokens=40),
    _completion("filtered draws", PREAMBLE * 2, top_k=20, min_p=0.02, seed=-7, temperature=1.3, ignore_eos=True,
                max_tokens=60),
    _completion("long answer", "Dear diary,", max_tokens=120, ignore_eos=True),
    _completion("two long answers", "1", max_tokens=90, ignore_eos=True, n=2, seed=13, temperature=0.9),
    _completion("long answer with log-probabilities", "The", max_tokens=100, logprobs=1, ignore_eos=True,
                repetition_penalty=1.2),
    _completion("echoed log-probabilities", PREAMBLE + "A bridge", echo=True, logprobs=2, max_tokens=12),
    _completion("scored prompt", PREAMBLE + "A tunnel is a hole.", max_tokens=0, echo=True, logprobs=1),
    _chat("prompt log-probabilities and ids", "What is coal?", prompt_logprobs=2, return_token_ids=True, max_tokens=12,
          can_stream=False),
    _completion("ids of two choices", PREAMBLE, n=2, seed=17, temperature=0.9, return_token_ids=True),
    _chat("tools, freely", "How fast is train 7?", tools=TOOLS, max_tokens=48),
    _chat("tools, required", "How fast is train 7?", tools=TOOLS, tool_choice="required", seed=9, temperature=0.8,
          parallel_tool_calls=False, max_tokens=48),
    _chat("tools, one by name", "How long is train 9?", tools=TOOLS, tool_choice=ONE_TOOL, max_tokens=32),
    _chat("tools, none", "How long is train 9?", tools=TOOLS, tool_choice="none", max_tokens=16),
    _response("response", "Who built the first railway?"),
    _response("response with log-probabilities", "Is steam hot?", include=["message.output_text.logprobs"],
              top_logprobs=2, seed=2, temperature=0.6),
    _response("response in JSON", "Name a train.", seed=6, temperature=0.7,
              text={"format": {"type": "json_schema", "name": "train", "schema": SCHEMA}}),
    _completion("completion log-probabilities", "The capital of France is", logprobs=2, max_tokens=10),
    Template("embeddings", EMBEDDINGS, {"input": [PREAMBLE, PREAMBLE * 2, "A train.", "A bridge."] * 2},
             can_stream=False),
    Template("coded embedding", EMBEDDINGS, {"input": PREAMBLE + "Three.", "encoding_format": "base64"},
             can_stream=False),
)  # fmt: skip
