"""Parameters of answers mean the same over both protocols."""

import pytest

from trimtab_protocol.extensions import number_of


@pytest.mark.parametrize(
    ("parameter", "number"),
    [(0.25, 0.25), ("0.25", 0.25), (8, 8.0), ("8", 8.0), ("small", None), (True, None), (None, None)],
)
def test_a_number_is_read_however_it_is_spelled(parameter, number):
    assert number_of(parameter) == number
