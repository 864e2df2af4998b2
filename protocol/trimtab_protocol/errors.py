"""`ProtocolError`: an invalid message, such as an `InvalidChat`.

Servers map it to INVALID_ARGUMENT or 400; clients raise it if a server's response is invalid.
"""

from trimtab_protocol.sanitize import printable


class ProtocolError(ValueError):
    """A message violates the Open Inference Protocol; the text names the field and the valid form.

    Text from the sender is bounded and has no control characters.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class InvalidChat(ProtocolError):
    """A chat request cannot be served; `code` is stable (`invalid_image`), `param` the invalid field."""

    def __init__(self, text: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.param = param
        self.code = code


def not_supported(field: str, advice: str) -> InvalidChat:
    return InvalidChat(f"{field} is not supported; {advice}", param=field, code="unsupported_parameter")
