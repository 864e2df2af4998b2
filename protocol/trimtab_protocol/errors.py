"""The one error of the protocol: what was wrong with a message, in words its sender can act on.

It is always the sender's fault. Servers turn it into INVALID_ARGUMENT or 400; clients see it when a server's answer
breaks the protocol.
"""

from trimtab_protocol.sanitize import printable


class ProtocolError(ValueError):
    """A message breaks the Open Inference Protocol; the text names the field and says what would be right.

    What the sender wrote is repeated in it, bounded and without control characters.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))
