"""What a multimodal model brings for its chats to be served."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer
from torch import Tensor

from trimtab_model_servers.chat.messages import Message
from trimtab_pipelines.image_tokens import ImageTokenRule, ImageTokens


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Where an image stands in a prompt: its first placeholder, and how many there are.

    Attributes:
        pieces: (start, placeholders) of each, where a model writes marks between an image's placeholders; else none.
    """

    start: int
    placeholders: int
    pieces: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of an image's embeddings.

    Attributes:
        total: how many.
        padding: how many of them, the last ones, are of tiles that show nothing.
        columns: of tiles that the image is cut into, where a model writes its rows and columns; else 0.
    """

    total: int
    padding: int = 0
    columns: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat as ids, and the places of its images, in order."""

    tokens: tuple[int, ...]
    places: tuple[ImageSpan, ...]

    @property
    def text_tokens(self) -> int:
        """Ids that are no placeholders."""
        return len(self.tokens) - sum(place.placeholders for place in self.places)


class ChatTokenizer(Protocol):
    """How a model is spoken to."""

    end_ids: frozenset[int]
    tokenizer: Tokenizer

    def prompt(self, messages: Sequence[Message], rows: Sequence[Rows]) -> Prompt:
        """Spell a chat whose images have ``rows`` of embeddings each, up to the assistant's turn to speak.

        Words never make a placeholder or another special token.

        Raises:
            RefusalError: 400, a chat that the model's template has no form for, or rows that no image of it has.
        """
        ...


class VisionEncoder(Protocol):
    """How a model takes images in."""

    @property
    def rule(self) -> ImageTokenRule:
        """How many rows an image becomes, by its size."""
        ...

    @property
    def width(self) -> int:
        """Numbers a row."""
        ...

    @property
    def name(self) -> str:
        """What encodes, and with which weights: embeddings of the same image under the same name are equal."""
        ...

    def rows(self, count: ImageTokens) -> Rows:
        """What the embeddings of an image of so many tokens have."""
        ...

    def pixels(self, file: bytes, images: int) -> Any:
        """Open a file of a chat of ``images`` and bring it into the encoder's form. Called on any thread.

        Raises:
            RefusalError: 422, it is no image.
        """
        ...

    def encode(self, pixels: Sequence[Any]) -> list[Tensor]:
        """Encode images as ``pixels`` gives them, [rows, width] each. Called in inference mode, by one thread."""
        ...
