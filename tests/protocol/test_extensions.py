"""Response parameters, the same over REST and gRPC, and text of third parties, truncated and printable."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_protocol import ProtocolError
from trimtab_protocol.extensions import (
    REJECTED_TASK_FILES,
    TASK_ACCURACIES,
    TASKS,
    parse_number,
    parse_rejected_task_files,
    parse_task_accuracies,
    parse_tasks,
    task_metadata,
)
from trimtab_protocol.sanitize import MAX_HEADER_CHARACTERS, MAX_TEXT_BYTES, fits_header, header_value, printable
from trimtab_router.refusal import Refusal


@pytest.mark.parametrize(
    ("parameter", "number"),
    [(0.25, 0.25), ("0.25", 0.25), (8, 8.0), ("8", 8.0), ("small", None), (True, None), (None, None)],
)
def test_number_parameters_are_parsed(parameter, number):
    assert parse_number(parameter) == number


def test_tasks_round_trip():
    names, refused = ["letters", "signs", "", "late"], {"2-odd": "it has 4 classes"}
    facts = task_metadata(names, refused)
    assert (parse_tasks(facts), parse_rejected_task_files(facts)) == (names, refused)
    assert list(task_metadata(names, {}, {"late": {}})) == [TASKS]


def test_task_accuracies_round_trip_without_samples_digest():
    known = Accuracy(value=0.75, source="Measured", samples=99, low=0.7, high=0.8, mean_confidence=0.9)
    judged = known.replace(samples_digest=f"sha256:{64 * '0'}")
    facts = task_metadata(["late"], {}, {"late": {"full": judged}})

    assert parse_task_accuracies(facts) == {"late": {"full": known}}


@pytest.mark.parametrize("other", [None, 3, "", "{", "[]", "[" * 100_000])
def test_foreign_metadata_have_no_tasks(other):
    assert parse_rejected_task_files({REJECTED_TASK_FILES: other}) == {}
    assert parse_task_accuracies({TASK_ACCURACIES: other}) == {}
    assert parse_tasks({TASKS: other}) == ([] if not isinstance(other, str) or not other else [other])


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
