"""Output of a plan that chose the placement of encoders."""

from tests.adapter.test_layouts import planned
from trimtab.plan_view import explanation_lines


def test_plan_explains_encoder_placement():
    none, many = explanation_lines(planned(100, 0.0)), explanation_lines(planned(40, 8.0))

    assert any(line.startswith("image encoding: colocated; disaggregated (encode small ×1") for line in none)
    assert any(line.startswith("image encoding: disaggregated; colocated") for line in many)
