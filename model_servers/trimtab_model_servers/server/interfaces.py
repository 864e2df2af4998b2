"""Interfaces of the models that a replica serves; importing this module imports no model."""

from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.embedding_store import EmbeddingStore, PendingImages
from trimtab_model_servers.chat.responses import FinishEvent, TokenEvent
from trimtab_model_servers.model_protocol import Fact
from trimtab_protocol import InferRequest, InferResponse
from trimtab_protocol.chat.embedding_refs import ChatTokenCounts, EmbeddingCounts, ImageIdentity


class ServedModel(Protocol):
    """A model that is ready to serve."""

    async def infer(self, request: InferRequest, worker: BatchWorker) -> InferResponse: ...

    def metadata(self) -> dict[str, object]: ...

    def facts(self) -> dict[str, Fact]: ...


@runtime_checkable
class ReportsLoad(Protocol):
    """A model that reports what is in flight."""

    def pending(self) -> dict[str, int]:
        """Load by name; see docs/develop/chat-stages.md."""
        ...

    def totals(self) -> dict[str, float]:
        """Totals since the start by name."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class ReportsFailure(Protocol):
    """A model that may fail for good while it serves."""

    @property
    def failure(self) -> Future[str]:
        """Done, from any thread, once the model has failed; holds the reason."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A model that counts the tokens of a request."""

    def count(self, request: InferRequest) -> ChatTokenCounts | EmbeddingCounts:
        """Count without computing anything; raises RefusalError."""
        ...


@runtime_checkable
class ServesChat(CountsTokens, Protocol):
    """A model that streams responses to chats."""

    def stream(self, request: InferRequest, worker: BatchWorker) -> AsyncGenerator[TokenEvent | FinishEvent, None]:
        """Answer a single-row request; raises RefusalError. Closing the generator cancels the request."""
        ...


@runtime_checkable
class StoresEmbeddings(Protocol):
    """A model that stores embeddings for other replicas."""

    embeddings: EmbeddingStore

    def add_names(self, names: Sequence[str], of: str | ImageIdentity) -> dict[str, object]:
        """Store embeddings under further names; raises RefusalError 404 if an image is not cached."""
        ...


@runtime_checkable
class AwaitsImages(Protocol):
    """A model that accepts chats before all of their images are encoded."""

    pending_images: PendingImages
