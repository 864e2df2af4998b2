"""`EngineRoute`: a route of OpenAI's API beside chats, which a third-party engine serves as the client writes it.

The router reads the model, what bounds the work of a request, and its data URLs; all else is forwarded unchanged. A
request travels as the tensor `messages`: its body without the model, which each variant names in its own way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json, to_json

from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol import Buffer
from trimtab_protocol.chat.chat_parser import SOURCES, require_allowed_urls
from trimtab_protocol.chat.data_urls import extract_data_urls, restore_data_urls
from trimtab_protocol.chat.openai_backend import prefix_salt
from trimtab_protocol.chat.openai_requests import MAX_CHOICES, require_few_values, require_forwardable
from trimtab_protocol.errors import InvalidChat, not_supported
from trimtab_protocol.rest import JSON_CONTENT_TYPE

MAX_SEQUENCES = 64
"""Prompts of one request, times its choices: they occupy the capacity of one."""
MAX_VALUES = 2**16
"""Of a body: texts, or token ids, of which a prompt or a batch of embeddings has thousands."""
_SCHEMAS = frozenset({"guided_json", "json_schema", "metadata", "parameters", "schema", "structured_outputs"})
"""Fields in which a URL is part of a JSON schema or a note, and nothing fetches it."""
_STORED = "the engine does not store responses for others to read; send the conversation as input"
_UNROUTABLE = {
    "previous_response_id": _STORED,
    "conversation": _STORED,
    "background": "a response is returned by its own request",
    "store": _STORED,
    "use_beam_search": "its sequences exceed what a request may occupy",
}
"""Fields that would need the replica of an earlier request, or occupy more than one request may, with the reason."""


@dataclass(frozen=True, slots=True)
class EngineRoute:
    """A path of an engine's API."""

    path: str
    streams: bool = False
    """Whether the engine always streams the response, so that its progress is seen."""
    sends_events: bool = False
    """Whether its stream is of the typed events of OpenAI's responses API, else of completion chunks."""
    form: bool = False
    """Whether the request is a form with a file."""
    defaults: Mapping[str, Any] | None = None
    """Fields added to each request."""


ROUTES: Final[Mapping[str, EngineRoute]] = {
    route.path: route
    for route in (
        EngineRoute("/v1/completions", streams=True, defaults={"stream": True}),
        EngineRoute("/v1/responses", streams=True, sends_events=True, defaults={"stream": True, "store": False}),
        EngineRoute("/v1/embeddings"),
        EngineRoute("/v1/rerank"),
        EngineRoute("/v1/score"),
        EngineRoute("/v1/audio/transcriptions", form=True),
        EngineRoute("/v1/audio/translations", form=True),
        EngineRoute("/tokenize"),
        EngineRoute("/detokenize"),
    )
}


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request to one of the routes, without its body."""

    route: EngineRoute
    streams: bool = False
    """Whether the client reads a stream."""
    includes_usage: bool = False
    content_type: str = JSON_CONTENT_TYPE
    cache_salt: str = ""
    """The client's own."""

    def body(self, model: str, tenant: str, written: bytes) -> bytes:
        """Body for an engine that names its model `model`; `tenant` salts prefixes unless it is empty."""
        if self.route.form:
            boundary = self.content_type.rpartition("boundary=")[2].strip('"')
            return f'--{boundary}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n'.encode() + written
        fields: dict[str, Any] = {"model": model}
        if self.route.streams and (tenant or self.cache_salt):
            fields["cache_salt"] = prefix_salt(tenant, self.cache_salt)
        return to_json(fields)[:-1] + b"," * (written != b"{}") + written[1:]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request as received: its model, empty if none is named, and its body without the model."""

    model: str
    body: bytes
    forwarded: ForwardedRequest


def parse_engine_request(route: EngineRoute, body: Buffer, max_json_bytes: int, bounds: ImageLimits) -> ParsedRequest:
    """Parse a JSON request. Raises InvalidChat with the field that is invalid, or not forwarded."""
    extracted = extract_data_urls(body, max_json_bytes, bounds.max_per_request)
    require_few_values(extracted.json, MAX_VALUES)
    try:
        fields = from_json(extracted.json, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidChat(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidChat("the body must be a JSON object")
    model, streams, options = fields.pop("model", ""), fields.get("stream"), fields.get("stream_options")
    for name, value, kind, kinds in (
        ("model", model, "a text", str | None),
        ("stream", streams, "true or false", bool | None),
        ("stream_options", options, "an object", dict | None),
        ("cache_salt", fields.get("cache_salt"), "a text", str | None),
    ):
        if not isinstance(value, kinds):
            raise InvalidChat(f"{name} must be {kind}", param=name)
    require_forwardable(fields)
    _require_one_request(route, fields)
    require_allowed_sources(fields, "", bounds)
    salt = fields.pop("cache_salt", None) if route.streams else None
    fields |= route.defaults or {}
    if route.streams and not route.sends_events:
        fields["stream_options"] = {**(options or {}), "include_usage": True}
    urls = {marker.encode(): url for marker, url in extracted.urls.items()}
    written = b"".join(restore_data_urls(to_json(fields), urls))
    includes_usage = bool(options and options.get("include_usage"))
    forwarded = ForwardedRequest(route, bool(streams and route.streams), includes_usage, cache_salt=salt or "")
    return ParsedRequest(model or "", written, forwarded)


def _require_one_request(route: EngineRoute, fields: Mapping[str, Any]) -> None:
    """Raise InvalidChat for a request that needs another's state, or does the work of many."""
    for name, reason in _UNROUTABLE.items():
        if fields.get(name):
            raise not_supported(name, f"remove it: {reason}")
    if not route.streams:
        return
    prompts, choices = fields.get("prompt"), 1
    count = len(prompts) if isinstance(prompts, list) and not all(isinstance(item, int) for item in prompts) else 1
    for name in ("n", "best_of"):
        value = fields.get(name)
        if value is not None and (not isinstance(value, int) or not 1 <= value <= MAX_CHOICES):
            raise InvalidChat(f"{name} must be an integer from 1 to {MAX_CHOICES}", param=name)
        choices = max(choices, value or 1)
    if count * choices > MAX_SEQUENCES:
        text = f"the request has {count} prompts of {choices} choices; send at most {MAX_SEQUENCES} in all"
        raise InvalidChat(text, param="prompt")


def require_allowed_sources(value: object, where: str, bounds: ImageLimits) -> None:
    """Raise InvalidChat for what the engine would fetch, unless images may be fetched from there."""
    if isinstance(value, list):
        for item in value:
            require_allowed_sources(item, where, bounds)
    elif isinstance(value, dict):
        for name, item in value.items():
            field = f"{where}.{name}" if where else str(name)
            if name.endswith(SOURCES):
                require_allowed_urls(item, field, bounds)
            elif name not in _SCHEMAS:
                require_allowed_sources(item, field, bounds)
