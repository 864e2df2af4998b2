"""Image tokens predicted from sizes against models' processors; `make bench NAME=image-tokens` takes 1,000 sizes."""

from dataclasses import replace

import pytest

from benchmarks.image_tokens import Spelled, counted, differences, families
from trimtab_pipelines.image_tokens import OneTile

SIZES = [(700, 400), (60, 900)]
FAMILIES = families()


@pytest.mark.parametrize("name", FAMILIES)
def test_predicted_tokens_equal_those_of_the_processor(name):
    maker, rules = FAMILIES[name]
    made = maker()

    assert differences(made, rules, [*((size,) for size in SIZES), SIZES]) == 0
    assert differences(made, [OneTile(7)], [SIZES[:1]]) == 1


def test_wrong_tile_marks_are_found():
    maker, (_, spelled, *_) = FAMILIES["smolvlm"]
    made = maker()
    assert isinstance(spelled, Spelled)

    assert counted(spelled, SIZES).marks == made(SIZES).marks > 2 * 16
    wrong = replace(spelled, shape=replace(spelled.shape, image_prompt=lambda rows: (rows.total,)))
    assert differences(made, [wrong], [SIZES]) == 1
