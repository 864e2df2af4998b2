"""How published models are spoken to: chats rendered by a template, and spelled as their tokenizer would spell them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from trimtab_model_servers.chat.interfaces import ImageSpan, Prompt, Rows
from trimtab_model_servers.chat.messages import Message
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.families.chat_templates import ChatTemplate, Piece, stored_names, stored_templates
from trimtab_model_servers.families.hf_vlm_configs import VlmConfig
from trimtab_model_servers.hf_folder import TOKENIZER_FILE

BYTES: Final = 256
Spell = Callable[[str], Sequence[int]]
Specials = Mapping[str, tuple[int, AddedToken]]
log = logging.getLogger(__name__)


class HfChatTokenizer:
    """Spells chats: those with random weights byte by byte, others with the tokenizer and template of their folder.

    Attributes:
        template: whose it is; the family's own where a folder has none that writes images.
    """

    def __init__(self, shape: VlmConfig, model: Any, stored: Path | None = None) -> None:
        self.end_ids = _ends_of(model)
        vocabulary = int(model.config.text_config.vocab_size)
        self.tokenizer = (
            byte_tokenizer(vocabulary) if stored is None else Tokenizer.from_file(str(stored / TOKENIZER_FILE))
        )
        self._shape = shape
        self._specials = _specials_of(self.tokenizer)
        self._words: Spell = bytes_of if stored is None else _words_of(self.tokenizer, self._specials)
        self.template: Literal["family", "stored"] = "family"
        self._mark = shape.image_mark
        self._template = ChatTemplate(shape.template, {*self._specials, self._mark}, {})
        if stored is not None:
            self._take_up(stored)

    def _take_up(self, folder: Path) -> None:
        """Speak by the folder's template, where it has one that writes images."""
        mark = self.tokenizer.id_to_token(self._shape.image_id) or self._shape.image_mark
        for found in stored_templates(folder):
            template = ChatTemplate(found.source, {*self._specials, mark}, stored_names(folder))
            reason = template.why_not(mark)
            if reason is None:
                self.template, self._mark, self._template = "stored", mark, template
                return
            log.warning("%s: the template in %s is not used: %s", folder, found.file, reason)

    def prompt(self, messages: Sequence[Message], rows: Sequence[Rows]) -> Prompt:
        """Spell a chat, each turn's images where its template has them.

        Raises:
            RefusalError: 400, the template has no form for it, or an image has rows that none of this model has.
        """
        pieces, mark = self._template.pieces(messages), Piece(self._mark, special=True)
        if (shown := pieces.count(mark)) != len(rows):
            raise RefusalError(400, f"messages: the model's template writes {shown} of their {len(rows)} images")
        spelling, left = _Spelling(self._words, self._specials, (self._mark, self._shape.image_id)), iter(rows)
        for piece in pieces:
            if piece == mark:
                self._add_image(spelling, next(left))
            else:
                spelling.add(piece)
        return spelling.prompt()

    def _add_image(self, spelling: "_Spelling", rows: Rows) -> None:
        try:
            around = self._shape.around(rows)
        except ValueError as error:
            raise RefusalError(400, str(error)) from error
        runs = []
        for part in around:
            if isinstance(part, int):
                runs.append(spelling.add_placeholders(part))
                continue
            for piece in self._template.split(part):
                spelling.add(piece)
        total = sum(count for _, count in runs)
        spelling.places.append(ImageSpan(runs[0][0], total, tuple(runs) if len(runs) > 1 else ()))


class _Spelling:
    """A prompt under way: words between two special tokens are spelled together, as the model's tokenizer does."""

    def __init__(self, words: Spell, specials: Specials, image: tuple[str, int]) -> None:
        self.places: list[ImageSpan] = []
        self._words, self._specials = words, specials
        self._mark, self._image_id = image
        self._tokens: list[int] = []
        self._said = ""
        self._strips = False

    def add(self, piece: Piece) -> None:
        """Add words, or a special token; one that the tokenizer does not know is words, too."""
        if piece.special and piece.text in self._specials:
            id_, token = self._specials[piece.text]
            self._end_words(token)
            self._tokens.append(id_)
        else:
            self._said += piece.text.lstrip() if self._strips and not self._said else piece.text

    def add_placeholders(self, count: int) -> tuple[int, int]:
        """Add an image's placeholders; returns where they begin, and how many there are."""
        _, token = self._specials.get(self._mark, (0, AddedToken(self._mark)))
        self._end_words(token)
        start = len(self._tokens)
        self._tokens += [self._image_id] * count
        return start, count

    def prompt(self) -> Prompt:
        """All of it."""
        self._end_words(AddedToken(""))
        return Prompt(tuple(self._tokens), tuple(self.places))

    def _end_words(self, token: AddedToken) -> None:
        """Spell what was said before a special token, some of which take the spaces around them away."""
        said = self._said.rstrip() if token.lstrip else self._said
        self._tokens += self._words(said) if said else ()
        self._said, self._strips = "", token.rstrip


def _ends_of(model: Any) -> frozenset[int]:
    """The tokens that end an answer, as ``generate`` takes them."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = model.config.text_config.eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


def _specials_of(tokenizer: Tokenizer) -> Specials:
    """The tokens that a tokenizer looks for before it spells anything, but for spaces."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {token.content: (id_, token) for id_, token in added if token.content.strip()}


def _words_of(tokenizer: Tokenizer, specials: Specials) -> Spell:
    """What spells words alone, in which none of these is a token of its own."""
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_special_tokens([AddedToken(content, special=True) for content in specials])
    own.encode_special_tokens = True

    def spelled(text: str) -> Sequence[int]:
        ids: Sequence[int] = own.encode(text, add_special_tokens=False).ids
        return ids

    return spelled


def bytes_of(text: str) -> Sequence[int]:
    """A text's bytes."""
    return text.encode()


def byte_tokenizer(vocabulary: int) -> Tokenizer:
    """A tokenizer of bytes; every id above them says its number."""
    alphabet = _byte_letters()
    words = alphabet + [f"<{number}>" for number in range(BYTES, vocabulary)]
    tokenizer = Tokenizer(BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_letters() -> list[str]:
    """The letters that stand for the bytes 0 to 255 in byte-level BPE, in the bytes' order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]
