"""Interfaces of the models that a replica serves; importing this module imports no model."""

from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.model_protocol import Fact
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_protocol import InferRequest, InferResponse
from trimtab_protocol.chat.embedding_refs import ChatTokenCounts, EmbeddingCounts, ImageIdentity
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk

if TYPE_CHECKING:  # imports torch
    from trimtab_model_servers.chat.embedding_store import EmbeddingStore, PendingImages


class ServedModel(Protocol):
    """A model that is ready to serve."""

    @property
    def spec(self) -> ModelSpec: ...

    async def infer(self, request: InferRequest, worker: BatchWorker) -> InferResponse: ...

    def facts(self) -> dict[str, Fact]: ...


@runtime_checkable
class ServesChats(Protocol):
    """A model that serves chats or their images."""

    def pending(self) -> dict[str, int]:
        """Load by name; see docs/develop/chat-stages.md."""

    def totals(self) -> dict[str, float]: ...

    async def count(self, request: InferRequest) -> ChatTokenCounts | EmbeddingCounts: ...

    async def close(self) -> None: ...


@runtime_checkable
class GeneratesText(Protocol):
    """A model that streams responses to chats, which may come before all of their images are encoded."""

    pending_images: "PendingImages"

    @property
    def failure(self) -> Future[str]:
        """Done, from any thread, once the model has failed for good; holds the reason."""

    def stream(self, request: InferRequest, worker: BatchWorker) -> AsyncGenerator[Chunk | LastChunk, None]:
        """Closing the generator cancels the request."""


@runtime_checkable
class StoresEmbeddings(Protocol):
    """A model that stores embeddings for other replicas."""

    embeddings: "EmbeddingStore"

    def add_names(self, names: Sequence[str], of: str | ImageIdentity) -> dict[str, object]: ...
