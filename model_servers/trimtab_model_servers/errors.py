"""Errors: a model that cannot be served, and a request that is rejected."""

from pydantic import ValidationError


class ModelError(Exception):
    """A model cannot be loaded; the message names the file or field and the valid form."""


class RefusalError(Exception):
    """One request is rejected; other requests are not affected."""

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code
        """400 invalid, 404 no such model, 413 too large, 429 queue full, 500 model failure, 503 shutting down."""


class InvalidRow(RefusalError):
    """A family raises it for a row that is the caller's fault: the caller of that row alone receives 400."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


def first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {first['msg']}" if field else first["msg"]
