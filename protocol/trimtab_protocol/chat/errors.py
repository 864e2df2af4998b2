"""What a chat may be refused for, in words and in the fields of OpenAI's errors."""

from trimtab_protocol.errors import ProtocolError


class InvalidChat(ProtocolError):
    """A chat cannot be served as it was asked.

    Args:
        text: names what is wrong, and says what would be right.
        param: the field at fault; None where it is no single one.
        code: stable, for programs (`invalid_image`); None for none.
    """

    def __init__(self, text: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.param = param
        self.code = code


def not_supported(field: str, advice: str) -> InvalidChat:
    """A field that asks for what is not done here."""
    return InvalidChat(f"{field} is not supported; {advice}", param=field, code="unsupported_parameter")
