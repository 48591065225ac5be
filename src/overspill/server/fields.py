"""Bodies of requests: their fields, types and limits.

null counts as absent, unknown fields are ignored. Fields that llama-server clamps are clamped here; what it refuses
is refused. Numbers are numbers: neither texts nor true and false are read as such. A field that is known but not served
is declared as well, so that `params` can refuse it where it would change the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from overspill.server.errors import ApiError
from overspill.text.breakers import DEFAULT_BREAKERS

B = TypeVar("B", bound=BaseModel)


def _whole(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("give a whole number")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("give a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("the number is too large") from None


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("give true or false")
    return value


def _not_negative(value: object) -> float:
    return max(_number(value), 0.0)


def _whole_not_negative(value: object) -> int:
    return max(_whole(value), 0)


def _share(value: object) -> float:
    return min(_not_negative(value), 1.0)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Share = Annotated[float, BeforeValidator(_share), Field(allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(_not_negative), Field(allow_inf_nan=False)]
Clamped = Annotated[int, BeforeValidator(_whole_not_negative)]
Texts = Annotated[list[str], BeforeValidator(_as_list)]


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="ignore")


class SamplingFields(Body):
    """What every request for text may set."""

    stream: Flag = False
    stream_options: dict[str, Any] = {}
    n_predict: Whole | None = Field(None, ge=-1)
    max_completion_tokens: Whole | None = Field(None, ge=-1)
    max_tokens: Whole | None = Field(None, ge=-1)
    n: Whole = Field(1, ge=1, validation_alias=AliasChoices("n", "n_cmpl"))
    stop: Texts = []
    ignore_eos: Flag = False
    temperature: NotNegative = 0.8
    dynatemp_range: NotNegative = 0.0
    dynatemp_exponent: NotNegative = 1.0
    top_k: Clamped = 40
    top_p: Share = 0.95
    min_p: Share = 0.05
    typical_p: Share = 1.0
    top_n_sigma: Number = -1.0
    min_keep: Clamped = 0
    xtc_probability: Share = 0.0
    xtc_threshold: Share = 0.1
    repeat_last_n: Whole = Field(64, ge=0)
    repeat_penalty: Number = Field(1.0, gt=0)
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    dry_multiplier: NotNegative = 0.0
    dry_base: Number = 1.75
    dry_allowed_length: Clamped = 2
    dry_penalty_last_n: Whole = Field(64, ge=-1)
    dry_sequence_breakers: list[str] = Field(list(DEFAULT_BREAKERS), min_length=1)
    mirostat: Whole = Field(0, ge=0, le=2)
    mirostat_tau: NotNegative = 5.0
    mirostat_eta: NotNegative = 0.1
    samplers: list[str] | str | None = None
    seed: Whole = -1
    logit_bias: list[Any] | dict[str, Any] = []
    cache_prompt: Flag = True
    id_slot: Whole = Field(-1, ge=-1)
    n_probs: Whole = Field(0, ge=0)
    return_progress: Flag = False
    timings_per_token: Flag = False
    return_tokens: Flag = False
    post_sampling_probs: Flag = False
    t_max_predict_ms: Number = -1
    sse_ping_interval: Number = -1
    grammar: str = ""
    json_schema: Any = None

    # Known, and refused where they would change the answer.
    grammar_lazy: Flag = False
    n_indent: Whole = 0
    lora: list[Any] = []

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk that tells the usage."""
        return self.stream_options.get("include_usage") is True

    @property
    def most_tokens(self) -> int:
        """The limit of generated tokens, -1 for none, by the first of its names that is given."""
        given = (self.n_predict, self.max_completion_tokens, self.max_tokens)
        return next((value for value in given if value is not None), -1)


class NativeBody(SamplingFields):
    """POST /completion."""

    prompt: Any
    response_fields: list[str] = []
    n_probs: Whole = Field(0, ge=0, validation_alias=AliasChoices("n_probs", "logprobs"))


class TextBody(SamplingFields):
    """POST /v1/completions. logprobs: how many of the likeliest tokens to list, 0 for only the one chosen. echo: the
    answer begins with the prompt."""

    prompt: Any
    logprobs: Whole | None = Field(None, ge=0)
    echo: Flag = False
    best_of: Whole = 1
    suffix: str = ""

    @property
    def listed(self) -> int | None:
        """How many of the likeliest tokens to list, by either of its names; None where no logprobs are wanted."""
        return self.n_probs or None if self.logprobs is None else self.logprobs


class ChatBody(SamplingFields):
    """POST /v1/chat/completions, /apply-template.

    continue_final_message: the last message is the beginning of the answer; echo: which is told with it.
    reasoning_budget_tokens: see `thinks`.
    """

    messages: list[dict[str, Any]] = Field(min_length=1)
    logprobs: Flag = False
    top_logprobs: Whole | None = Field(None, ge=0)
    tools: list[dict[str, Any]] = []
    functions: list[Any] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: Flag = False
    reasoning_format: Literal["none", "auto", "deepseek"] = "auto"
    response_format: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    echo: Flag = False
    reasoning_budget_tokens: Whole = Field(
        -1, ge=-1, validation_alias=AliasChoices("reasoning_budget_tokens", "thinking_budget_tokens")
    )

    @property
    def thinks(self) -> bool:
        """False where the request wants no thoughts."""
        return self.reasoning_effort != "none" and self.reasoning_budget_tokens != 0

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools the model may call."""
        return [] if self.tool_choice == "none" else self.tools


class TokenizeBody(Body):
    """POST /tokenize."""

    content: Any
    add_special: Flag = False
    parse_special: Flag = True
    with_pieces: Flag = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[Whole]


def parse_body(kind: type[B], values: dict[str, Any]) -> B:
    """A body of a kind; ApiError 400 naming the first field that is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"Field '{path}': {first['msg'].removeprefix('Value error, ')}") from None
