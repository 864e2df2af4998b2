"""`InvalidChat`: a chat request that cannot be served."""

from trimtab_protocol.errors import ProtocolError


class InvalidChat(ProtocolError):
    """A chat request cannot be served.

    Args:
        text: names the error and the valid form.
        param: the invalid field, if there is a single one.
        code: stable code for programs (`invalid_image`), or None.
    """

    def __init__(self, text: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.param = param
        self.code = code


def not_supported(field: str, advice: str) -> InvalidChat:
    """Error for a field that is not supported."""
    return InvalidChat(f"{field} is not supported; {advice}", param=field, code="unsupported_parameter")
