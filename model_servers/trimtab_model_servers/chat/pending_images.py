"""`PendingImages`: images of chats that were sent before all of their images were encoded."""

from collections.abc import Sequence

from trimtab_model_servers.chat.embedding_client import ImageRefusal
from trimtab_model_servers.chat.keyed_futures import TTL_SECONDS, KeyedFutures
from trimtab_model_servers.errors import RefusalError
from trimtab_protocol.chat.embedding_refs import ArrivedImage, EmbeddingRef


class PendingImages:
    """Images by request id and their number in the chat; for one event loop.

    Args:
        ttl_seconds: how long an image is awaited, or its arrival stored.
    """

    def __init__(self, ttl_seconds: float = TTL_SECONDS) -> None:
        self._arrivals: KeyedFutures[ArrivedImage] = KeyedFutures(ttl_seconds)

    def __len__(self) -> int:
        return len(self._arrivals)

    def resolve(self, request_id: str, images: Sequence[ArrivedImage]) -> None:
        """Record where images can be fetched from, before or after their chat arrives.

        Raises:
            RefusalError: 429, too many images are awaited.
        """
        for image in images:
            name = _name(request_id, image.image)
            if not self._arrivals.was_dropped(name):  # else the chat that awaited it has ended
                future = self._arrivals.get_or_create(name)
                if not future.done():
                    future.set_result(image)

    async def wait(self, request_id: str, image: int, announced: EmbeddingRef) -> str:
        """Wait for an image; return the URL of its embeddings.

        Raises:
            ImageRefusal: it did not arrive in time, or differs from the announced one.
        """
        name = _name(request_id, image)
        try:
            arrived = await self._arrivals.wait(name)
        except RefusalError as refusal:
            raise ImageRefusal(image, str(refusal)) from refusal
        finally:
            self._arrivals.drop(name)
        if _describe(arrived) != _describe(announced):
            raise ImageRefusal(image, f"it has {_describe(arrived)}; announced were {_describe(announced)}")
        return arrived.url


def _describe(image: EmbeddingRef) -> str:
    """The properties that determine a prompt and its cached prefix."""
    tiles = f" in {image.columns} columns of tiles" if image.columns else ""
    return f"{image.rows} rows{tiles}, {image.digest!r}"


def _name(request_id: str, image: int) -> str:
    return f"{request_id}/{image}"
