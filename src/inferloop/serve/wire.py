"""OpenAI request bodies: decoded, checked completely, and turned into a Call, before the engine hears of them.

Nothing is ignored: a field that is unknown, or known and not supported, is refused with its name. Fields that OpenAI
defines as having no influence on the answer (user, metadata, ...) are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from inferloop.backends.protocols import GeneratorInfo, Prompt, ServedAdapter
from inferloop.core.errors import RequestError
from inferloop.core.request import Sampling
from inferloop.engine.text.answer import PLAIN_ANSWER, AnswerPlan
from inferloop.serve.decode import decode_body
from inferloop.serve.messages import Message, TemplateVariables, checked_variables, plain_messages
from inferloop.serve.no_op import NoOp
from inferloop.serve.sampled import (
    Obfuscation,
    Sampled,
    TokenId,
    adapter_named,
    check_grammar,
    check_length,
    check_sampled,
    check_stream_options,
    check_token_ids,
    sampling_of,
)
from inferloop.serve.structured import ResponseFormat, grammar_of
from inferloop.serve.tools import ToolChoice, ToolDefinition, choice_of, plan_answer, tools_of

MAX_N = 16
MAX_PROMPTS = 64
MAX_CHOICES = 128
"""Of all prompts of one request together."""
COMPLETION_MAX_TOKENS = 16
"""What OpenAI's completions endpoint generates at most when max_tokens is absent."""

Unused = Annotated[Any, Meta(description="Accepted; has no influence on the answer by OpenAI's definition.")]


class StreamOptions(Obfuscation, kw_only=True):
    """`continuous_usage_stats`: every chunk has the usage so far, as with vLLM."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_AS_IT_IS: dict[str, tuple[Any, ...]] = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields of vLLM that say what happens here anyway."""


class Common(Sampled, kw_only=True):
    """What chat and completions share. null means the default, as with OpenAI."""

    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    prompt_logprobs: (
        Annotated[
            int,
            Meta(ge=0, le=20, description="Tell these of the prompt, and so many of the likeliest."),
        ]
        | None
    ) = None
    return_token_ids: bool | None = None
    skip_special_tokens: NoOp = None
    spaces_between_special_tokens: NoOp = None
    include_stop_str_in_output: NoOp = None
    truncate_prompt_tokens: NoOp = None
    use_beam_search: NoOp = None
    add_special_tokens: NoOp = None
    user: Unused = None
    metadata: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None


class ChatRequest(Common):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: NoOp = None
    function_call: NoOp = None
    response_format: ResponseFormat | None = None
    modalities: NoOp = None
    audio: NoOp = None
    prediction: NoOp = None
    reasoning_effort: NoOp = None
    verbosity: NoOp = None
    service_tier: NoOp = None
    store: NoOp = None
    web_search_options: NoOp = None
    add_generation_prompt: NoOp = None
    continue_final_message: NoOp = None
    chat_template: NoOp = None
    chat_template_kwargs: TemplateVariables = None
    include_reasoning: NoOp = None

    no_op: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_AS_IT_IS,
        "add_special_tokens": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template": (),
        "include_reasoning": (True,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "web_search_options": (),
    }


class CompletionRequest(Common, kw_only=True):
    prompt: str | list[TokenId | str | list[TokenId]]
    max_tokens: (
        Annotated[int, Meta(ge=0, description="0 only with echo or prompt_logprobs: nothing is generated.")] | None
    ) = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: NoOp = None
    best_of: NoOp = None

    no_op: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_AS_IT_IS,
        "add_special_tokens": (True,),
        "suffix": ("",),
        "best_of": (1,),
    }


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request: what to generate, and how to answer."""

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    stream: bool
    include_usage: bool
    continuous_usage: bool = False
    """In every chunk what the whole request has used so far, instead of null."""
    cache_salt: str = ""
    priority: int = 0
    num_per_prompt: int = 1
    echo: bool = False
    num_prompt_logprobs: int | None = None
    """How many are to be shown as `prompt_logprobs`; with `echo` and log-probabilities others are shown there."""
    return_token_ids: bool = False
    answer: AnswerPlan = PLAIN_ANSWER
    adapter: ServedAdapter | None = None

    @property
    def echo_logprobs(self) -> bool:
        """Whether the echoed prompt has its log-probabilities beside it, as the output has."""
        return self.echo and self.sampling.num_logprobs is not None


def parse_chat(body: bytes, info: GeneratorInfo) -> Call:
    """Raises RequestError naming the field."""
    request = decode_body(body, ChatRequest)
    check_sampled(request, info)
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise RequestError("max_tokens and max_completion_tokens differ; give one", param="max_completion_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    check_length(request.messages, info, "messages")
    tools = tools_of(request.tools or ())
    prompt = Prompt(
        messages=plain_messages(request.messages),
        tools=tuple(tool.definition for tool in tools),
        variables=checked_variables(request.chat_template_kwargs),
    )
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens or request.max_tokens
    wanted = grammar_of(request.structured_outputs, request.response_format)
    choice = None if request.tool_choice is None else choice_of(request.tool_choice)
    plan, grammar = plan_answer(tools, choice, request.parallel_tool_calls, wanted, info)
    check_grammar(grammar, request, info)
    _check_scoring(request, info)
    sampling = sampling_of(request, max_tokens, num_logprobs, grammar)
    call = _call(request, (prompt,), replace(sampling, num_prompt_logprobs=request.prompt_logprobs))
    return replace(call, answer=plan, adapter=adapter_named(request.model, info))


def parse_completion(body: bytes, info: GeneratorInfo) -> Call:
    """Raises RequestError naming the field."""
    request = decode_body(body, CompletionRequest)
    check_sampled(request, info)
    prompts = plain_prompts(request.prompt, info, "prompt", num_output=0 if request.max_tokens == 0 else 1)
    _check_scoring(request, info)
    grammar = grammar_of(request.structured_outputs, None)
    check_grammar(grammar, request, info)
    sampling = sampling_of(request, request.max_tokens, request.logprobs, grammar)
    if sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=max(COMPLETION_MAX_TOKENS, sampling.min_tokens), cut_max_tokens=True)
    asked = [request.prompt_logprobs, request.logprobs if request.echo else None]
    sampling = replace(sampling, num_prompt_logprobs=max((k for k in asked if k is not None), default=None))
    call = _call(request, prompts, sampling)
    return replace(call, echo=bool(request.echo), adapter=adapter_named(request.model, info))


def _check_scoring(request: ChatRequest | CompletionRequest, info: GeneratorInfo) -> None:
    """What is asked about the prompt itself. Raises RequestError."""
    wanted = {"prompt_logprobs": request.prompt_logprobs is not None}
    if isinstance(request, CompletionRequest):
        wanted["echo"] = bool(request.echo) and request.logprobs is not None
        wanted["max_tokens"] = request.max_tokens == 0
        if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
            message = "max_tokens 0 generates nothing; it goes together with echo or prompt_logprobs"
            raise RequestError(message, param="max_tokens")
    for field, is_wanted in wanted.items():
        if is_wanted and not info.scoring:
            how = {"echo": "echo together with logprobs", "max_tokens": "max_tokens 0"}.get(field, field)
            raise RequestError(f"{how} is not supported by this server", param=field, code="unsupported_parameter")
    if request.prompt_logprobs is not None and request.stream:
        message = "prompt_logprobs is not supported in a stream; echo with logprobs is"
        raise RequestError(message, param="prompt_logprobs")


def _call(request: Common, prompts: tuple[Prompt, ...], sampling: Sampling) -> Call:
    options = request.stream_options
    check_stream_options(options, request)
    include_usage = bool(options and options.include_usage)
    continuous_usage = bool(options and options.continuous_usage_stats)
    if continuous_usage and not include_usage:
        message = "stream_options.continuous_usage_stats needs include_usage to be true"
        raise RequestError(message, param="stream_options.continuous_usage_stats")
    n = request.n or 1
    if n * len(prompts) > MAX_CHOICES:
        raise RequestError(f"{len(prompts)} prompts with n = {n} make more than {MAX_CHOICES} choices", param="n")
    return Call(
        prompts,
        sampling,
        bool(request.stream),
        include_usage,
        continuous_usage=continuous_usage,
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        num_per_prompt=n,
        num_prompt_logprobs=request.prompt_logprobs,
        return_token_ids=bool(request.return_token_ids),
    )


def plain_prompts(
    prompt: str | list[int | str | list[int]],
    info: GeneratorInfo,
    field: str,
    *,
    num_output: int = 1,
    most: int = MAX_PROMPTS,
) -> tuple[Prompt, ...]:
    """A text, token ids, texts, or lists of token ids; never mixed, because nobody means that. At least `num_output`
    tokens are to follow each. Raises RequestError naming `field`, and which of several."""
    if isinstance(prompt, str):
        return (_plain_prompt(prompt, info, field, num_output),)
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return (_plain_prompt(ids, info, field, num_output),)
    if len(prompt) > most:
        raise RequestError(f"{field} takes at most {most} texts, got {len(prompt)}", param=field)
    if len({type(item) for item in prompt}) > 1:
        raise RequestError(f"{field} mixes texts, token ids and lists of them; give one kind", param=field)
    several = [item for item in prompt if not isinstance(item, int)]
    return tuple(_plain_prompt(item, info, f"{field}[{i}]", num_output) for i, item in enumerate(several))


def _plain_prompt(prompt: str | list[int], info: GeneratorInfo, field: str, num_output: int) -> Prompt:
    if len(prompt) == 0:
        raise RequestError(f"{field} must not be empty", param=field)
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    check_length(prompt, info, field, num_output=num_output)
    check_token_ids(prompt, info.vocab_size, field)
    return Prompt(token_ids=tuple(prompt))
