"""Images of chats that were asked before all of theirs were encoded: what is told of each once it is there."""

from collections.abc import Sequence

from trimtab_model_servers.chat.embedding_client import ImageRefusal
from trimtab_model_servers.chat.keyed_futures import KEEP_SECONDS, KeyedFutures
from trimtab_model_servers.errors import RefusalError
from trimtab_protocol.chat.embedding_refs import ArrivedImage, EmbeddingRef


class PendingImages:
    """Images by their request's id and their number in its chat; used on one event loop.

    Args:
        seconds: how long one is waited for, or known that nobody waits for.
    """

    def __init__(self, seconds: float = KEEP_SECONDS) -> None:
        self._told: KeyedFutures[ArrivedImage] = KeyedFutures(seconds)

    def __len__(self) -> int:
        return len(self._told)

    def tell(self, request_id: str, arrived: Sequence[ArrivedImage]) -> None:
        """Say where images are pulled from; they may be told before their chat was asked.

        Raises:
            RefusalError: 429, too many are waited for.
        """
        for one in arrived:
            name = _name(request_id, one.image)
            if not self._told.dropped(name):  # else whoever waited for it has left
                found = self._told.of(name)
                if not found.done():
                    found.set_result(one)

    async def wait(self, request_id: str, image: int, announced: EmbeddingRef) -> str:
        """Where an image is pulled from, once it is told.

        Raises:
            ImageRefusal: it was not told in time, or is not what was announced.
        """
        name = _name(request_id, image)
        try:
            told = await self._told.wait(name)
        except RefusalError as refusal:
            raise ImageRefusal(image, str(refusal)) from refusal
        finally:
            self._told.drop(name)
        if _laid(told) != _laid(announced):
            raise ImageRefusal(image, f"it is {_laid(told)}; announced were {_laid(announced)}")
        return told.url


def _laid(one: EmbeddingRef) -> str:
    """What a prompt and its prefixes follow from."""
    cut = f" in {one.columns} columns of tiles" if one.columns else ""
    return f"{one.rows} rows{cut}, {one.digest!r}"


def _name(request_id: str, image: int) -> str:
    return f"{request_id}/{image}"
