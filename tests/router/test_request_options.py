"""Parsing of request options, and refusal of invalid ones."""

import pytest

from trimtab_router.refusal import Refusal
from trimtab_router.request import NO_OPTIONS, RequestOptions, parse_request_options


def test_default_options_are_one_object():
    assert parse_request_options({}) is NO_OPTIONS
    assert parse_request_options({"binary_data_output": True, "priority": 0, "timeout": 0}) is NO_OPTIONS
    assert NO_OPTIONS.only_latency


def test_numbers_may_be_sent_as_text():
    given_wish = parse_request_options(
        {"trimtab.accuracy_floor": "0.9", "trimtab.utility": 3, "trimtab.task": "digits", "priority": "1"}
    )

    assert given_wish == RequestOptions(accuracy_floor=0.9, utility=3.0, task="digits", priority=1)
    assert not given_wish.only_latency


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"trimtab.accuracy_floor": 1.5}, "accuracy_floor"),
        ({"trimtab.accuracy_floor": "much"}, "accuracy_floor"),
        ({"trimtab.accuracy_floor": float("nan")}, "accuracy_floor"),
        ({"trimtab.accuracy_floor": True}, "accuracy_floor"),
        ({"trimtab.accuracy_floor": 0.5, "trimtab.accuracy_probability": 1}, "accuracy_probability"),
        ({"trimtab.accuracy_probability": 0.9}, "accuracy_floor"),
        ({"trimtab.utility": -1}, "utility"),
        ({"trimtab.utility": float("inf")}, "utility"),
        ({"trimtab.task": 3}, "task"),
        ({"trimtab.task": "x" * 200}, "128"),
        ({"priority": 6}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": -1}, "priority"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "1"}, "timeout"),
        ({"trimtab.acuracy_floor": 0.9}, "trimtab.acuracy_floor"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(parameters, named):
    with pytest.raises(Refusal, match=named) as refused:
        parse_request_options(parameters)

    assert refused.value.code.name == "INVALID_ARGUMENT"
