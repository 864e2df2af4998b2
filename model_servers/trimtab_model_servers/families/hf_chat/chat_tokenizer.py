"""`HfChatTokenizer`: renders chats with a template and tokenizes them as the model's own tokenizer does."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from trimtab_model_servers.chat.interfaces import EmbeddingShape, ImageSpan, Prompt, encode_text
from trimtab_model_servers.chat.messages import Message
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.families.hf_chat.builtin_templates import ImagePrompt
from trimtab_model_servers.families.hf_chat.chat_templates import (
    ChatTemplate,
    TemplateSegment,
    read_special_tokens,
    read_templates,
)
from trimtab_model_servers.families.hf_chat.configs import VlmConfig
from trimtab_model_servers.weights import files

BYTES: Final = 256
Tokenize = Callable[[str], Sequence[int]]
SpecialTokens = Mapping[str, tuple[int, AddedToken]]
log = logging.getLogger(__name__)


class HfChatTokenizer:
    """Tokenizes chats with the tokenizer and template of the model's folder; without a folder byte by byte.

    ``config``: None for a text model, whose folder must have a template; raises ModelError without one.
    """

    def __init__(self, config: VlmConfig | None, model: Any, folder: Path | None = None) -> None:
        self.end_ids = _end_ids(model)
        vocabulary = int(model.config.get_text_config().vocab_size)
        self.tokenizer = (
            byte_tokenizer(vocabulary) if folder is None else Tokenizer.from_file(str(folder / files.TOKENIZER_FILE))
        )
        self._config = config
        self._special_tokens = _special_tokens(self.tokenizer)
        self._tokenize_text: Tokenize = (
            str.encode if folder is None else _text_tokenizer(self.tokenizer, self._special_tokens)
        )
        self.template_source: Literal["family", "stored"] = "family"
        """``stored`` if the folder has a template that supports the model's messages."""
        found = None if folder is None else self._stored_template(folder)
        if found is not None:
            self.template_source, (self._image_mark, self._template) = "stored", found
        elif config is not None:
            self._image_mark = config.image_mark
            self._template = ChatTemplate(config.template, {*self._special_tokens, self._image_mark}, {})
        else:
            raise ModelError(f"{folder}: there is no chat template that can be used; add {files.TEMPLATE_FILE}")

    def _stored_template(self, folder: Path) -> tuple[str, ChatTemplate] | None:
        """The first template of a folder that renders a chat, with its mark of an image, empty for text models."""
        config, mark = self._config, ""
        if config is not None:
            mark = self.tokenizer.id_to_token(config.image_id) or config.image_mark
        special, variables = {*self._special_tokens, *filter(None, [mark])}, read_special_tokens(folder)
        for stored in read_templates(folder):
            template = ChatTemplate(stored.source, special, variables, texts_only=config is None)
            problem = template.problem(mark)
            if problem is None:
                return mark, template
            log.warning("%s: the template in %s is not used: %s", folder, stored.file, problem)
        return None

    def build_prompt(self, messages: Sequence[Message], shapes: Sequence[EmbeddingShape]) -> Prompt:
        """Tokenize a chat, with its images where the template puts them; errors as of ChatTokenizer."""
        segments, mark = self._template.render(messages), TemplateSegment(self._image_mark, special=True)
        if (count := segments.count(mark)) != len(shapes):
            raise RefusalError(400, f"messages: the model's template writes {count} of their {len(shapes)} images")
        image_token = (self._image_mark, -1 if self._config is None else self._config.image_id)
        builder = _PromptBuilder(self._tokenize_text, self._special_tokens, image_token)
        remaining = iter(shapes)
        for segment in segments:
            if segment == mark and self._config is not None:
                self._add_image(builder, self._config.image_prompt, next(remaining))
            else:
                builder.add(segment)
        return builder.prompt()

    def _add_image(
        self, builder: "_PromptBuilder", image_prompt_of: Callable[[EmbeddingShape], ImagePrompt], shape: EmbeddingShape
    ) -> None:
        try:
            image_prompt = image_prompt_of(shape)
        except ValueError as error:
            raise RefusalError(400, str(error)) from error
        runs = []
        for part in image_prompt:
            if isinstance(part, int):
                runs.append(builder.add_placeholders(part))
                continue
            for segment in self._template.split(part):
                builder.add(segment)
        total = sum(count for _, count in runs)
        builder.image_spans.append(ImageSpan(runs[0][0], total, tuple(runs) if len(runs) > 1 else ()))


class _PromptBuilder:
    """A prompt in progress. Text between two special tokens is tokenized as a whole, as the model's tokenizer does."""

    def __init__(self, tokenize: Tokenize, special_tokens: SpecialTokens, image_token: tuple[str, int]) -> None:
        self.image_spans: list[ImageSpan] = []
        self._tokenize, self._special_tokens = tokenize, special_tokens
        self._image_mark, self._image_id = image_token
        self._tokens: list[int] = []
        self._text = ""
        self._strips = False

    def add(self, segment: TemplateSegment) -> None:
        """Add text or a special token; a special token that the tokenizer does not have is text."""
        if segment.special and segment.text in self._special_tokens:
            id_, token = self._special_tokens[segment.text]
            self._end_text(token)
            self._tokens.append(id_)
        else:
            self._text += segment.text.lstrip() if self._strips and not self._text else segment.text

    def add_placeholders(self, count: int) -> tuple[int, int]:
        """Add an image's placeholders; return the position of the first, and their number."""
        _, token = self._special_tokens.get(self._image_mark, (0, AddedToken(self._image_mark)))
        self._end_text(token)
        start = len(self._tokens)
        self._tokens += [self._image_id] * count
        return start, count

    def prompt(self) -> Prompt:
        self._end_text(AddedToken(""))
        return Prompt(tuple(self._tokens), tuple(self.image_spans))

    def _end_text(self, token: AddedToken) -> None:
        """Tokenize the text before a special token; some special tokens strip the spaces around them."""
        text = self._text.rstrip() if token.lstrip else self._text
        self._tokens += self._tokenize(text) if text else ()
        self._text, self._strips = "", token.rstrip


def _end_ids(model: Any) -> frozenset[int]:
    """The end tokens, as ``generate`` uses them."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = model.config.get_text_config().eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


def _special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """The tokens that a tokenizer matches before it splits text, except whitespace."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {token.content: (id_, token) for id_, token in added if token.content.strip()}


def _text_tokenizer(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> Tokenize:
    """A copy of a tokenizer that tokenizes special tokens as text."""
    text_tokenizer = Tokenizer.from_str(tokenizer.to_str())
    text_tokenizer.add_special_tokens([AddedToken(content, special=True) for content in special_tokens])
    text_tokenizer.encode_special_tokens = True

    def tokenize(text: str) -> Sequence[int]:
        return encode_text(text_tokenizer, text)

    return tokenize


def byte_tokenizer(vocabulary: int) -> Tokenizer:
    """A tokenizer of bytes; every id above them decodes to its number."""
    alphabet = _byte_alphabet()
    words = alphabet + [f"<{number}>" for number in range(BYTES, vocabulary)]
    tokenizer = Tokenizer(BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_alphabet() -> list[str]:
    """The characters that represent the bytes 0 to 255 in byte-level BPE, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]
