"""Text of third parties is truncated and stripped of control characters."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_protocol import ProtocolError
from trimtab_protocol.sanitize import MAX_HEADER_CHARACTERS, MAX_TEXT_BYTES, fits_header, header_value, printable
from trimtab_router.refusal import Refusal


@given(st.text(max_size=5000))
def test_printable_text_is_short_and_printable(text):
    written = printable(text)

    assert len(written.encode()) <= MAX_TEXT_BYTES
    assert written.isprintable()


@given(st.text(st.characters(categories=("L", "N", "P")), max_size=200))
def test_printable_text_is_unchanged(text):
    assert printable(text) == text


def test_long_text_keeps_beginning_and_end():
    written = printable(f"unknown input {'A' * 20_000!r}; sample takes: x")

    assert written.startswith("unknown input 'AAA")
    assert written.endswith("AAA'; sample takes: x")


@given(st.text(max_size=300))
def test_header_value_is_short_printable_ascii(text):
    value = header_value(text)

    assert fits_header(value)
    assert len(value) <= MAX_HEADER_CHARACTERS


@pytest.mark.parametrize("error", [ProtocolError, lambda text: Refusal("InvalidArgument", text)])
def test_error_messages_cannot_forge_log_lines(error, caplog):
    with caplog.at_level(logging.INFO):
        logging.getLogger("odd").info("%s", error("x\n2025 CRITICAL all is lost " + "A" * 20_000))

    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) <= MAX_TEXT_BYTES
