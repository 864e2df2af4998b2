"""Text is told as soon as no stop string can begin in it, and never a stop string or what follows."""

from hypothesis import given
from hypothesis import strategies as st

from trimtab_model_servers.engine.stop_strings import StopFilter

PIECES = st.lists(st.text("ab", max_size=4), max_size=8)
STOPS = st.lists(st.text("ab", min_size=1, max_size=3), max_size=3)


@given(PIECES, STOPS)
def test_what_is_told_is_the_text_before_the_stop_string_that_is_complete_first(pieces, stops):
    followed, told, stopped = StopFilter(stops), "", False
    whole = ""
    for piece in pieces:
        whole += piece
        said = followed.add(piece)
        told += said.text
        stopped = said.stopped
        if stopped:
            break
        held = len(whole) - len(told)
        assert not any(stop in whole for stop in stops)
        assert all(not stop.startswith(whole[at:]) for stop in stops for at in range(len(whole) - held))
    if stopped:
        assert told == whole[: min(whole.find(stop) for stop in stops if stop in whole)]
    else:
        assert told + followed.rest() == whole


def test_without_stop_strings_all_is_told_at_once():
    assert StopFilter([]).add("as it comes").text == "as it comes"
