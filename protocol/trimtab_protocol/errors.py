"""`ProtocolError`: an invalid message.

Servers map it to INVALID_ARGUMENT or 400; clients raise it if a server's response is invalid.
"""

from trimtab_protocol.sanitize import printable


class ProtocolError(ValueError):
    """A message violates the Open Inference Protocol; the text names the field and the valid form.

    Text from the sender is bounded and has no control characters.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))
