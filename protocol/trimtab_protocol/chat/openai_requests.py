"""Chat completion requests: the fields that the router reads, and what else a client sends.

A third-party engine receives all fields but those that would break the isolation of clients. Trimtab's own engine
rejects every field that it does not support and that would change the response. Only the first error of a list is
reported, so that parsing an invalid request is cheap.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import PydanticCustomError, from_json

from trimtab_protocol.errors import InvalidChat, not_supported
from trimtab_protocol.sanitize import printable

MAX_CHOICES = 8
MAX_MESSAGES = 1024
MAX_PARTS = 4096
"""Of all messages together, which bounds the parsing time."""
MAX_VALUES = 2**14
"""Of the whole body, counted before it is parsed: more than the messages and parts above need."""
MAX_STOPS = 4
_SEEDS = 2**63
_ROLES = ("system", "developer", "user", "assistant")
_IMAGE_TYPES = {"image_url", "input_image", "image"}
_TEXT_TYPES = {"text", "input_text", "output_text"}


class _LenientModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")

    @property
    def others(self) -> Mapping[str, Any]:
        """Fields beside the declared ones."""
        return self.model_extra or {}


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
        return is_image_part(self.type)

    @property
    def url(self) -> str | None:
        where = self.image_url or self.image
        return where.url if where is not None else None


def is_image_part(kind: str) -> bool:
    return kind in _IMAGE_TYPES


def _as_parts(content: object) -> object:
    if content is None:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(_LenientModel):
    """A message of the chat."""

    role: str = Field(max_length=64)
    content: Annotated[tuple[ContentPart, ...], FailFast(), BeforeValidator(_as_parts)] = ()


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
    """Fields that the router reads."""

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


_ACCEPTED_VALUES: dict[str, Sequence[Any]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
}
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that do not change the response of a model without tools."""
_ROUTER_FIELDS = {
    "priority": "the router orders chats by their deadlines",
    **dict.fromkeys(("request_id", "rid"), "the router names each request; send the header x-request-id"),
    **dict.fromkeys(
        ("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
        "it would connect the engine to other servers",
    ),
    **dict.fromkeys(("session_params", "session_id"), "clients could read each other's sessions"),
    "data_parallel_rank": "the router chooses the replica",
    "prompt_embeds": "a tensor of another shape ends the engine for all clients",
    **dict.fromkeys(
        ("mm_processor_kwargs", "media_io_kwargs"),
        "it changes the memory that an image takes, and engines have executed code by it; operating points set it",
    ),
}
"""Fields by which one client could harm another, with the reason why they are not forwarded."""


def parse_chat_request(body: bytes, *, forwarded: bool = False) -> tuple[ChatRequest, dict[str, Any]]:
    """Parse a chat completion request without data URLs, and return it also as written.

    `forwarded`: a third-party engine may serve it. Raises InvalidChat with the field that is invalid, not supported, or
    not forwarded.
    """
    require_few_values(body)
    try:
        written = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidChat(f"the body is not JSON: {error}") from error
    try:
        request = ChatRequest.model_validate(written)
    except ValidationError as error:
        raise _invalid(error) from error
    if forwarded:
        require_forwardable(request.others)
    else:
        _require_supported("", request.others)
        if request.stream_options is not None:
            _require_supported("stream_options.", request.stream_options.others)
    for turn, message in enumerate(request.messages):
        _check_message(f"messages[{turn}]", message, forwarded=forwarded)
    return request, written


def require_forwardable(fields: Mapping[str, Any]) -> None:
    """Raise InvalidChat for a field by which one client could harm another at an engine."""
    for name, reason in _ROUTER_FIELDS.items():
        if fields.get(name) is not None:
            raise not_supported(name, f"remove it: {reason}")


def _has_effect(name: str, value: Any) -> bool:
    """Whether a field that Trimtab's own engine does not know would change its response."""
    return bool(value) and name not in _WITHOUT_EFFECT and value not in _ACCEPTED_VALUES.get(name, ())


def _require_supported(where: str, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if _has_effect(name, value):
            raise not_supported(f"{where}{printable(name, 64)}", "remove it")


def require_few_values(body: bytes, limit: int = MAX_VALUES) -> None:
    """Reject JSON of many small values, which takes long to parse; text of any length is one value."""
    if body.count(b",") <= limit:
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = unescaped.split(b'"', 4 * limit)[::2]
    if b"".join(outside).count(b",") > limit:
        raise InvalidChat(f"the body has more than {limit} values; send at most as many")


def _check_message(where: str, message: Message, *, forwarded: bool) -> None:
    if not forwarded:
        if message.role not in _ROLES:
            text = f"{where}.role {message.role!r} is not supported; send one of: {', '.join(_ROLES)}"
            raise InvalidChat(text, param=f"{where}.role", code="unsupported_value")
        _require_supported(f"{where}.", message.others)
    for index, part in enumerate(message.content):
        field = f"{where}.content[{index}]"
        if part.is_image:
            if part.url is None:
                raise InvalidChat(f"{field}.image_url is missing", param=f"{field}.image_url")
        elif part.type in _TEXT_TYPES:
            if part.text is None:
                raise InvalidChat(f"{field}.text is missing", param=f"{field}.text")
        elif not forwarded or part.type.endswith("_embeds"):
            raise InvalidChat(
                f"{field}.type {part.type!r} is not supported; send text and image_url",
                param=f"{field}.type",
                code="unsupported_value",
            )
        if not forwarded:
            _require_supported(f"{field}.", part.others)


def _invalid(error: ValidationError) -> InvalidChat:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ""
    for step in first["loc"]:
        where += f"[{step}]" if isinstance(step, int) else f".{step}" if where else str(step)
    return InvalidChat(f"{where or 'the body'}: {first['msg']}", param=where or None)
