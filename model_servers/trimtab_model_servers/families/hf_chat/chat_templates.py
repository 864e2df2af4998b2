"""`ChatTemplate`: a model's Jinja template, rendered in transformers' sandbox so that callers cannot inject tokens.

A template may trim, join and reorder the callers' text, so the position of a character does not reveal its origin.
Instead, the characters that begin and end special tokens are replaced by substitutes in the callers' text while a
template renders it: a special token in the output is the template's own.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.models import BPE

from trimtab_model_servers.chat.messages import ImagePart, Message, TextPart
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.families.hf_chat.configs import TRANSFORMERS
from trimtab_model_servers.weights import files

_KEY: Final = "chat_template"
_PRIVATE: Final = ((0xE000, 0xF900), (0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))
"""Unicode's private use areas."""
_NOTHING: Final = "(?!)"
"""Pattern that matches nothing."""
_IMAGE_PART, _TEXT_PART = ImagePart(type="image"), TextPart(type="text", text="Probe?")


@dataclass(frozen=True, slots=True)
class TemplateSegment:
    """A segment of a rendered chat: text, or a special token of the template itself."""

    text: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class StoredTemplate:
    """A template in a model's folder."""

    file: str
    source: str


class ChatTemplate:
    """Jinja, as of transformers' ``apply_chat_template``; ``special_tokens`` are those that it may write.

    ``texts_only``: messages are texts, as templates of text models take them, instead of lists of parts.
    """

    def __init__(
        self, source: str, special_tokens: Iterable[str], variables: Mapping[str, str], *, texts_only: bool = False
    ) -> None:
        self._source, self._variables, self._texts_only = source, dict(variables), texts_only
        longest_first = sorted(set(special_tokens), key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or _NOTHING})")
        self._guarded = sorted({special[end] for special in longest_first for end in (0, -1)})
        self._renderer: Any = TRANSFORMERS.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))

    def render(self, messages: Sequence[Message]) -> list[TemplateSegment]:
        """Render a chat up to the assistant's turn; RefusalError 400 if the template does not support it."""
        substitutes = dict(zip(self._guarded, _unused_characters(messages, len(self._guarded)), strict=True))
        restore = {ord(substitute): character for character, substitute in substitutes.items()}
        try:
            rendered = self._apply([self._input(message, str.maketrans(substitutes)) for message in messages])
        except Exception as error:  # a template may raise anything
            problem = " ".join(str(error).translate(restore).split())[:300]
            raise RefusalError(400, f"messages: the model's template does not support them: {problem}") from error
        return [
            segment if segment.special else TemplateSegment(segment.text.translate(restore))
            for segment in self.split(rendered)
        ]

    def split(self, text: str) -> list[TemplateSegment]:
        parts = enumerate(self._special_pattern.split(text))
        return [TemplateSegment(part, special=bool(index % 2)) for index, part in parts if part]

    def problem(self, mark: str) -> str | None:
        """Reason why the template cannot render chats, with images as ``mark`` unless empty; None if it can."""
        parts = (_IMAGE_PART, _TEXT_PART) if mark else (_TEXT_PART,)
        try:
            segments = self.render([Message(role="user", content=parts)])
        except RefusalError as refusal:
            return str(refusal)
        if segments.count(TemplateSegment(mark, special=True)) != (mark != ""):
            return f"it does not write an image as {mark}"
        if not any("Probe" in segment.text for segment in segments):
            return "it does not write the caller's text"
        return None

    def _input(self, message: Message, substitutes: dict[int, str]) -> dict[str, Any]:
        """A message as input of the template, its text with substitutes; an empty message has one empty text part."""
        if self._texts_only:
            return {"role": message.role, "content": message.text.translate(substitutes)}
        parts = [
            {"type": "image"} if text is None else {"type": "text", "text": text.translate(substitutes)}
            for text in message.segments or ("",)
        ]
        return {"role": message.role, "content": parts}

    def _apply(self, messages: list[dict[str, Any]]) -> str:
        arguments = {"chat_template": self._source, "tokenize": False, "add_generation_prompt": True}
        return str(self._renderer.apply_chat_template(messages, **(self._variables | arguments)))


def read_templates(folder: Path) -> list[StoredTemplate]:
    """The templates of a folder, in transformers' order of precedence; ModelError if a file is invalid."""
    contents = [
        (files.PROCESSOR_FILE, files.read_json(folder, files.PROCESSOR_FILE).get(_KEY)),
        (files.OLD_TEMPLATE_FILE, files.read_json(folder, files.OLD_TEMPLATE_FILE).get(_KEY)),
        (files.TEMPLATE_FILE, files.read_text(folder, files.TEMPLATE_FILE)),
        (files.TOKENIZER_CONFIG_FILE, files.read_json(folder, files.TOKENIZER_CONFIG_FILE).get(_KEY)),
    ]
    sources = ((file, _default_template(folder / file, content)) for file, content in contents)
    return [StoredTemplate(file, source) for file, source in sources if source]


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Named special tokens of a folder's tokenizer, such as ``bos_token``; ModelError if a file is invalid."""
    config = files.read_json(folder, files.TOKENIZER_CONFIG_FILE)
    extra = config.get("extra_special_tokens")
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: token for name, token in contents.items() if isinstance(token, str)}


def _default_template(path: Path, content: object) -> str | None:
    """A file's only template, or the one named default."""
    if isinstance(content, list):
        named = {entry.get("name"): entry.get("template") for entry in content if isinstance(entry, dict)}
        content = named.get("default")
    elif isinstance(content, dict):
        content = content.get("default")
    if content is not None and not isinstance(content, str):
        raise ModelError(f"{path}: {_KEY} is {type(content).__name__}; should be text")
    return content


def _unused_characters(messages: Sequence[Message], count: int) -> list[str]:
    """``count`` private characters not in the messages; RefusalError 400 if these contain nearly all."""
    used = set(chain.from_iterable(message.text for message in messages))
    free = (chr(code) for first, end in _PRIVATE for code in range(first, end) if chr(code) not in used)
    characters = list(islice(free, count))
    if len(characters) < count:
        raise RefusalError(400, "messages: they hold nearly every private character of Unicode; should leave some out")
    return characters
