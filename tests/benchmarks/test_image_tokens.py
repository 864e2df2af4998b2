"""Image tokens as told by size are those that models' own processors make; of 1,000 sizes: make bench NAME=image-tokens."""

from dataclasses import replace

import pytest

from benchmarks.image_tokens import Spelled, counted, differences, families
from trimtab_pipelines.image_tokens import OneTile

SIZES = [(700, 400), (60, 900)]
FAMILIES = families()


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_size_tells_is_what_its_processor_makes(name):
    maker, rules = FAMILIES[name]
    made = maker()

    assert differences(made, rules, [*((size,) for size in SIZES), SIZES]) == 0
    assert differences(made, [OneTile(7)], [SIZES[:1]]) == 1


def test_marks_of_tiles_that_are_told_otherwise_are_found():
    maker, (_, spelled, *_) = FAMILIES["smolvlm"]
    made = maker()
    assert isinstance(spelled, Spelled)

    assert counted(spelled, SIZES).marks == made(SIZES).marks > 2 * 16
    wrong = replace(spelled, shape=replace(spelled.shape, around=lambda rows: (rows.total,)))
    assert differences(made, [wrong], [SIZES]) == 1
