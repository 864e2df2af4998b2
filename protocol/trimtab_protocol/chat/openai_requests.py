"""Chat completion requests: lenient parsing, with errors for unsupported fields.

Unknown fields are ignored. Unsupported fields that would change the response are rejected. Only the first error of a
list is reported, so that parsing an invalid request is cheap.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import PydanticCustomError

from trimtab_protocol.errors import InvalidChat, not_supported

MAX_CHOICES = 8
MAX_MESSAGES = 1024
MAX_PARTS = 4096
"""Of all messages together, which bounds the parsing time."""
MAX_VALUES = 2**14
"""Of the whole body, counted before it is parsed: more than the messages and parts above need."""
MAX_STOPS = 4
_SEEDS = 2**63
_IMAGE_TYPES = {"image_url", "input_image", "image"}
_TEXT_TYPES = {"text", "input_text", "output_text"}


class _LenientModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ImageUrl(_LenientModel):
    """A data URL or an http(s) URL."""

    url: str = Field(min_length=1)
    detail: str | None = None


def _as_url(written: object) -> object:
    """Accept a plain string as URL."""
    return {"url": written} if isinstance(written, str) else written


ImageField = Annotated[ImageUrl, BeforeValidator(_as_url)]


class ContentPart(_LenientModel):
    """A content part of a message."""

    type: str = Field(max_length=64)
    text: str | None = None
    image_url: ImageField | None = None
    image: ImageField | None = None

    @property
    def is_image(self) -> bool:
        return self.type in _IMAGE_TYPES

    @property
    def url(self) -> str | None:
        where = self.image_url or self.image
        return where.url if where is not None else None


def _as_parts(content: object) -> object:
    if content is None:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(_LenientModel):
    """A message of the chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[tuple[ContentPart, ...], FailFast(), BeforeValidator(_as_parts)] = ()
    tool_calls: Any = None


class StreamOptions(_LenientModel):
    """Options of a streamed response."""

    include_usage: bool | None = None


def _as_stops(written: object) -> object:
    if written is None:
        return ()
    return (written,) if isinstance(written, str) else written


def _require_bounded(messages: object) -> object:
    """Reject too many messages or parts before they are parsed."""
    if not isinstance(messages, list):
        return messages
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = sum(len(content) for content in contents if isinstance(content, list))
    for item, count, limit in (("messages", len(messages), MAX_MESSAGES), ("parts", parts, MAX_PARTS)):
        if count > limit:
            context = {"count": count, "item": item, "limit": limit}
            raise PydanticCustomError("too_long", "the chat has {count} {item}; send at most {limit}", context)
    return messages


class ChatRequest(_LenientModel):
    """Supported fields; others are rejected in `_UnsupportedFields`, or ignored."""

    model: str = Field(max_length=256)
    messages: Annotated[tuple[Message, ...], Field(min_length=1), FailFast(), BeforeValidator(_require_bounded)]
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(default=None, ge=-_SEEDS, lt=_SEEDS)
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        Field(max_length=MAX_STOPS),
        FailFast(),
        BeforeValidator(_as_stops),
    ] = ()
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    dry_run: bool | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def image_urls(self) -> list[tuple[str, str]]:
        """Field and URL of each image, in order."""
        return [
            (f"messages[{turn}].content[{index}].image_url", part.url)
            for turn, message in enumerate(self.messages)
            for index, part in enumerate(message.content)
            if part.is_image and part.url is not None
        ]


class _UnsupportedFields(_LenientModel):
    """Fields that would change the response; values without effect are accepted."""

    tools: Any = None
    functions: Any = None
    tool_choice: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    logit_bias: Any = None
    top_logprobs: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None


class _FullRequest(ChatRequest, _UnsupportedFields):
    pass


_ACCEPTED_VALUES: dict[str, Sequence[Any]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


def parse_chat_request(body: bytes) -> ChatRequest:
    """Parse a chat completion request without data URLs; InvalidChat names a field that is not supported or valid."""
    _require_few_values(body)
    try:
        request = _FullRequest.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from error
    for name in _UnsupportedFields.model_fields:
        value = getattr(request, name)
        if value and value not in _ACCEPTED_VALUES.get(name, ()):
            raise not_supported(name, "remove it")
    for turn, message in enumerate(request.messages):
        _check_message(f"messages[{turn}]", message)
    return request


def _require_few_values(body: bytes) -> None:
    """Reject JSON of many small values, which takes long to parse; text of any length is one value."""
    if body.count(b",") <= MAX_VALUES:
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = unescaped.split(b'"', 4 * MAX_VALUES)[::2]
    if sum(piece.count(b",") for piece in outside) > MAX_VALUES:
        raise InvalidChat(f"the body has more than {MAX_VALUES} values; send at most as many")


def _check_message(where: str, message: Message) -> None:
    if message.tool_calls:
        raise not_supported(f"{where}.tool_calls", "remove it")
    for index, part in enumerate(message.content):
        field = f"{where}.content[{index}]"
        if part.type in _TEXT_TYPES:
            if part.text is None:
                raise InvalidChat(f"{field}.text is missing", param=f"{field}.text")
        elif not part.is_image:
            raise InvalidChat(
                f"{field}.type {part.type!r} is not supported; send text and image_url",
                param=f"{field}.type",
                code="unsupported_value",
            )
        elif part.url is None:
            raise InvalidChat(f"{field}.image_url is missing", param=f"{field}.image_url")


def _invalid(error: ValidationError) -> InvalidChat:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return InvalidChat(f"the body is not JSON: {first['msg']}")
    where = ""
    for step in first["loc"]:
        where += f"[{step}]" if isinstance(step, int) else f".{step}" if where else str(step)
    return InvalidChat(f"{where or 'the body'}: {first['msg']}", param=where or None)
