"""What can go wrong, in two kinds: a model that cannot be served at all, and one request that cannot be answered."""

from mlserver.errors import MLServerError


class ModelError(Exception):
    """A model cannot be loaded; the message names the file or field and says what would be right."""


class RefusalError(MLServerError):  # type: ignore[misc]  # MLServer ships no types
    """One request is refused.

    An MLServer error, so that MLServer's own REST and gRPC sides answer with the same code and message as the data
    port. 400: the caller's fault; 404: no such model; 413: too large; 429: too many batches wait; 500: the model
    failed; 503: this replica is going away.
    """

    status_code: int

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message, status_code)
