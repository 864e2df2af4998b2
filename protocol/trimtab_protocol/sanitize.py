"""Sanitizing of untrusted text for messages, log lines and headers.

Names, ids and texts of clients may have any content and length. They are bounded and contain no control characters when
repeated.
"""

MAX_TEXT_BYTES = 1000
MAX_HEADER_CHARACTERS = 128
_HEAD_BYTES = 600
_GAP = " … "


def printable(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Escape control characters, and cut the middle of a long text.

    The beginning and the end are preserved: messages name the error first and the valid form last.
    """
    if len(text) > 2 * max_bytes:  # bounds the cost of long texts
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
    """A header value: at most 128 characters of printable ASCII; others become `?`."""
    text = text[:MAX_HEADER_CHARACTERS]
    if not fits_header(text):
        text = "".join(c if fits_header(c) else "?" for c in text)
    return text.strip()


def fits_header(text: str) -> bool:
    """Whether a text is printable ASCII, which cannot end a header."""
    return text.isascii() and text.isprintable()
