"""Stop strings: text is released once no stop string can begin in it."""

from hypothesis import given
from hypothesis import strategies as st

from trimtab_model_servers.engine.stop_strings import StopFilter

CHUNKS = st.lists(st.text("ab", max_size=4), max_size=8)
STOPS = st.lists(st.text("ab", min_size=1, max_size=3), max_size=3)


@given(CHUNKS, STOPS)
def test_released_text_ends_before_first_complete_stop_string(texts, stops):
    stop_filter, released, stopped = StopFilter(stops), "", False
    whole = ""
    for text in texts:
        whole += text
        chunk = stop_filter.add(text)
        released += chunk.text
        stopped = chunk.stopped
        if stopped:
            break
        withheld = len(whole) - len(released)
        assert not any(stop in whole for stop in stops)
        assert all(not stop.startswith(whole[at:]) for stop in stops for at in range(len(whole) - withheld))
    if stopped:
        assert released == whole[: min(whole.find(stop) for stop in stops if stop in whole)]
    else:
        assert released + stop_filter.flush() == whole


def test_without_stop_strings_text_is_released_at_once():
    assert StopFilter([]).add("as it comes").text == "as it comes"
