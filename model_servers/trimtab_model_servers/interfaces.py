"""What a replica asks of whatever it hosts, apart from what makes it: importing this imports no model."""

from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.embedding_store import EmbeddingStore
from trimtab_model_servers.chat.pending_images import PendingImages
from trimtab_model_servers.chat.responses import FinishEvent, TokenEvent
from trimtab_model_servers.model_metadata import Fact
from trimtab_protocol import InferRequest, InferResponse
from trimtab_protocol.chat.embedding_refs import CountedChat, CountedImages, Identity


class ServedModel(Protocol):
    """A model, ready to answer."""

    async def infer(self, request: InferRequest, worker: BatchWorker) -> InferResponse:
        """Answer one request; raises RefusalError."""
        ...

    def metadata(self) -> dict[str, object]:
        """The protocol's model metadata, with our own facts under `parameters`."""
        ...

    def facts(self) -> dict[str, Fact]:
        """What this model is, beyond its tensors."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A model that tells what is in flight."""

    def pending(self) -> dict[str, int]:
        """What is in flight, by name."""
        ...

    def done(self) -> dict[str, float]:
        """What it has done since it started, by name."""
        ...

    async def close(self) -> None:
        """Serve what was taken in to its end, and stop."""
        ...


@runtime_checkable
class ReportsFailure(Protocol):
    """A model that may fail for good while it serves, and tells why once it has."""

    @property
    def failure(self) -> Future[str]:
        """Done, from any thread, once it will never answer again."""
        ...


@runtime_checkable
class Pricing(Protocol):
    """A model that tells what a request would take."""

    def count(self, request: InferRequest) -> CountedChat | CountedImages:
        """Tell it, in tokens, and compute nothing; raises RefusalError."""
        ...


@runtime_checkable
class ServesChat(Pricing, Protocol):
    """A model that answers chats word by word."""

    def stream(self, request: InferRequest, worker: BatchWorker) -> AsyncGenerator[TokenEvent | FinishEvent, None]:
        """Answer the only row of a request; raises RefusalError. Who stops listening cancels it."""
        ...


@runtime_checkable
class KeepsEmbeddings(Protocol):
    """A model that keeps embeddings to be pulled."""

    kept: EmbeddingStore

    def keep_also(self, names: Sequence[str], of: str | Identity) -> dict[str, object]:
        """Keep under further names; raises RefusalError 404 where what was made of an image is not cached any more."""
        ...


@runtime_checkable
class Awaiting(Protocol):
    """A model that may be asked about images before all of them are encoded."""

    coming: PendingImages
