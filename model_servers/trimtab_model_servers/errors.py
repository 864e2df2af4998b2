"""What can go wrong, in two kinds: a model that cannot be served at all, and one request that cannot be answered."""

from pydantic import ValidationError


class ModelError(Exception):
    """A model cannot be loaded; the message names the file or field and says what would be right."""


class RefusalError(Exception):
    """One request is refused; the other requests go on.

    Attributes:
        status_code: 400, the caller's fault; 404, no such model; 413, too large; 429, too many batches wait; 500, the
            model failed; 503, this replica is going away.
    """

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code


def problem_of(error: ValidationError) -> str:
    """The first of what is wrong with settings: which field, and what would be right."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
