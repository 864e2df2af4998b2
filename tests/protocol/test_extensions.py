"""Response parameters: the same over REST and gRPC."""

import pytest

from trimtab_pipelines.accuracy_evidence import Accuracy
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
    judged = known.model_copy(update={"samples_digest": f"sha256:{64 * '0'}"})
    facts = task_metadata(["late"], {}, {"late": {"full": judged}})

    assert parse_task_accuracies(facts) == {"late": {"full": known}}


@pytest.mark.parametrize("other", [None, 3, "", "{", "[]", "[" * 100_000])
def test_foreign_metadata_have_no_tasks(other):
    assert parse_rejected_task_files({REJECTED_TASK_FILES: other}) == {}
    assert parse_task_accuracies({TASK_ACCURACIES: other}) == {}
    assert parse_tasks({TASKS: other}) == ([] if not isinstance(other, str) or not other else [other])
