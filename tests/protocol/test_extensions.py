"""Parameters of answers mean the same over both protocols."""

import pytest

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_protocol.extensions import (
    TASKS,
    TASKS_JUDGED,
    TASKS_REFUSED,
    number_of,
    task_accuracies,
    task_facts,
    tasks_of,
    tasks_refused_of,
)


@pytest.mark.parametrize(
    ("parameter", "number"),
    [(0.25, 0.25), ("0.25", 0.25), (8, 8.0), ("8", 8.0), ("small", None), (True, None), (None, None)],
)
def test_a_number_is_read_however_it_is_spelled(parameter, number):
    assert number_of(parameter) == number


def test_tasks_are_read_as_they_are_told():
    names, refused = ["letters", "signs", "", "late"], {"2-odd": "it has 4 classes"}
    facts = task_facts(names, refused)
    assert (tasks_of(facts), tasks_refused_of(facts)) == (names, refused)
    assert list(task_facts(names, {}, {"late": {}})) == [TASKS]


def test_what_was_measured_of_tasks_is_read_as_it_is_told_but_for_its_samples():
    known = Accuracy(value=0.75, source="Measured", samples=99, low=0.7, high=0.8, mean_confidence=0.9)
    judged = known.model_copy(update={"samples_digest": f"sha256:{64 * '0'}"})
    facts = task_facts(["late"], {}, {"late": {"full": judged}})

    assert task_accuracies(facts) == {"late": {"full": known}}


@pytest.mark.parametrize("other", [None, 3, "", "{", "[]", "[" * 100_000])
def test_a_model_of_another_make_tells_of_no_tasks(other):
    assert tasks_refused_of({TASKS_REFUSED: other}) == {}
    assert task_accuracies({TASKS_JUDGED: other}) == {}
    assert tasks_of({TASKS: other}) == ([] if not isinstance(other, str) or not other else [other])
