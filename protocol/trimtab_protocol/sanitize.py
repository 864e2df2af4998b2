"""What others wrote, made fit to travel: into messages, log lines and headers.

A name, an id or a text of a caller may hold anything and be of any length. Where we repeat it, it is bounded and has no
character that ends a line, a header or a terminal's patience. Pure.
"""

MAX_TEXT_BYTES = 1000
MAX_HEADER_CHARACTERS = 128
_HEAD_BYTES = 600
_GAP = " … "


def printable(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """A text as it may be told or logged: control characters escaped, its middle cut where it is too long.

    Beginning and end are kept: a message of ours names the culprit in the one, and what would be right in the other.
    """
    if len(text) > 2 * max_bytes:  # so that a long one costs no more than a short one
        text = text[:max_bytes] + text[-max_bytes:]
        cut = True
    else:
        cut = False
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    if not cut and len(text) <= max_bytes // 4:  # no character has more than four bytes
        return text
    encoded = text.encode()
    if not cut and len(encoded) <= max_bytes:
        return text
    head = min(_HEAD_BYTES, max_bytes // 2)
    tail = max_bytes - head - len(_GAP.encode())
    return encoded[:head].decode(errors="ignore") + _GAP + encoded[-tail:].decode(errors="ignore")


def header_value(text: str) -> str:
    """A value as it may stand in a header: at most 128 characters, printable ASCII; others become `?`."""
    text = text[:MAX_HEADER_CHARACTERS]
    if not fits_header(text):
        text = "".join(c if fits_header(c) else "?" for c in text)
    return text.strip()


def fits_header(text: str) -> bool:
    """Whether a text is printable ASCII, so that it can neither end a header nor mean another in another encoding."""
    return text.isascii() and text.isprintable()
