"""Chats written by a model's Jinja template, rendered by transformers in its sandbox, and what of them callers wrote.

A template may trim, join and reorder what callers say, so that nobody can tell afterwards by its place whose a
character was. Instead the characters that begin and end special tokens stand under substitutes while a template
renders what callers say: a special token that is found in what it wrote is the template's own.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.models import BPE

from trimtab_model_servers.chat.messages import ImagePart, Message, TextPart
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.families.hf_files import json_of, text_of
from trimtab_model_servers.families.hf_vlm_configs import TRANSFORMERS
from trimtab_model_servers.hf_folder import (
    OLD_TEMPLATE_FILE,
    PROCESSOR_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
)

_KEY: Final = "chat_template"
_PRIVATE: Final = ((0xE000, 0xF900), (0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))
"""Code points that stand for nothing, by Unicode's own word."""
_PROBE: Final = Message(role="user", content=(ImagePart(type="image"), TextPart(type="text", text="Probe?")))


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a rendered chat: words, or a special token that the template itself wrote."""

    text: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A template that a folder holds: in which file, and what it says."""

    file: str
    source: str


class ChatTemplate:
    """One template.

    Args:
        source: Jinja, as transformers' ``apply_chat_template`` takes it.
        specials: the special tokens that it may write, as text.
        named: what else it may refer to, ``bos_token`` for instance.
    """

    def __init__(self, source: str, specials: Iterable[str], named: Mapping[str, str]) -> None:
        self._source, self._named = source, dict(named)
        longest_first = sorted(set(specials), key=len, reverse=True)
        self._specials = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._guarded = sorted({special[end] for special in longest_first for end in (0, -1)})
        self._renderer: Any = TRANSFORMERS.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))

    def pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """Write a chat up to the assistant's turn to speak.

        Raises:
            RefusalError: 400, the template has no form for it.
        """
        guards = dict(zip(self._guarded, _unused(messages, len(self._guarded)), strict=True))
        try:
            rendered = self._rendered([_said(message, str.maketrans(guards)) for message in messages])
        except Exception as error:  # a template may do anything that its sandbox lets it
            problem = " ".join(str(error).translate(_backwards(guards)).split())[:300]
            raise RefusalError(400, f"messages: the model's template has no form for them: {problem}") from error
        back = _backwards(guards)
        return [piece if piece.special else Piece(piece.text.translate(back)) for piece in self.split(rendered)]

    def split(self, text: str) -> list[Piece]:
        """Part a text at its special tokens."""
        parts = enumerate(self._specials.split(text))
        return [Piece(part, special=bool(place % 2)) for place, part in parts if part]

    def why_not(self, mark: str) -> str | None:
        """Why it cannot speak of images, each of which it should write as ``mark``; None where it can."""
        try:
            pieces = self.pieces([_PROBE])
        except RefusalError as refusal:
            return str(refusal)
        if sum(piece == Piece(mark, special=True) for piece in pieces) != 1:
            return f"it does not write an image as {mark}"
        if not any("Probe" in piece.text for piece in pieces):
            return "it does not write what a caller says"
        return None

    def _rendered(self, said: list[dict[str, Any]]) -> str:
        told = {"chat_template": self._source, "tokenize": False, "add_generation_prompt": True}
        return str(self._renderer.apply_chat_template(said, **(self._named | told)))


def stored_templates(folder: Path) -> list[Found]:
    """The templates that a folder holds, in the order in which transformers prefers them.

    Raises:
        ModelError: one of its files is not what it should be.
    """
    found = [
        (PROCESSOR_FILE, json_of(folder, PROCESSOR_FILE).get(_KEY)),
        (OLD_TEMPLATE_FILE, json_of(folder, OLD_TEMPLATE_FILE).get(_KEY)),
        (TEMPLATE_FILE, text_of(folder, TEMPLATE_FILE)),
        (TOKENIZER_CONFIG_FILE, json_of(folder, TOKENIZER_CONFIG_FILE).get(_KEY)),
    ]
    sources = ((file, _default_of(folder / file, written)) for file, written in found)
    return [Found(file, source) for file, source in sources if source]


def stored_names(folder: Path) -> dict[str, str]:
    """The special tokens that a folder's tokenizer has names for, ``bos_token`` for instance.

    Raises:
        ModelError: its configuration is not what it should be.
    """
    written = json_of(folder, TOKENIZER_CONFIG_FILE)
    extra = written.get("extra_special_tokens")
    named = {name: token for name, token in written.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    read = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: token for name, token in read.items() if isinstance(token, str)}


def _default_of(path: Path, written: object) -> str | None:
    """The template among those that a file holds: the only one, or the one called default."""
    if isinstance(written, list):
        named = {one.get("name"): one.get("template") for one in written if isinstance(one, dict)}
        written = named.get("default")
    elif isinstance(written, dict):
        written = written.get("default")
    if written is not None and not isinstance(written, str):
        raise ModelError(f"{path}: {_KEY} is {type(written).__name__}; should be text")
    return written


def _said(message: Message, guards: Mapping[int, str]) -> dict[str, Any]:
    """A turn as templates read it, its words under substitutes; one that says nothing has an empty text."""
    parts = [
        {"type": "image"} if words is None else {"type": "text", "text": words.translate(guards)}
        for words in message.spoken or ("",)
    ]
    return {"role": message.role, "content": parts}


def _unused(messages: Sequence[Message], count: int) -> list[str]:
    """So many characters that nobody says.

    Raises:
        RefusalError: 400, callers say nearly all there are.
    """
    said = set(chain.from_iterable(message.text for message in messages))
    free = (chr(code) for first, end in _PRIVATE for code in range(first, end) if chr(code) not in said)
    found = [one for one, _ in zip(free, range(count), strict=False)]
    if len(found) < count:
        raise RefusalError(400, "messages: they hold nearly every private character of Unicode; should leave some out")
    return found


def _backwards(guards: Mapping[str, str]) -> dict[int, str]:
    return {ord(guard): character for character, guard in guards.items()}
