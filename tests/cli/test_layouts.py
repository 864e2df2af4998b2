"""What the command line says of a plan that chose a layout."""

from tests.adapter.test_layouts import planned
from trimtab.plan_view import explanation_lines


def test_a_plan_says_whether_images_are_encoded_apart_and_what_the_other_way_would_cost():
    none, many = explanation_lines(planned(100, 0.0)), explanation_lines(planned(40, 8.0))

    assert any(line.startswith("images of chats: whole; parted (encode small ×1") for line in none)
    assert any(line.startswith("images of chats: parted; whole") for line in many)
