"""Server-sent events are read wherever the stream is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_protocol import ProtocolError
from trimtab_protocol.sse import SseParser

STREAM = (
    b': alive\n\ndata: {"a": 1}\n\nevent: error\r\ndata:no space\r\n\r\ndata: one\ndata: two\nid: 7\n\n:\n\ndata: re'
)
EVENTS = [("message", b'{"a": 1}'), ("error", b"no space"), ("message", b"one\ntwo")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_the_same_wherever_the_stream_is_cut(cuts):
    reader, edges = SseParser(), [0, *sorted(cuts), len(STREAM)]
    told = [event for start, stop in pairwise(edges) for event in reader.feed(STREAM[start:stop])]

    assert told == EVENTS


@pytest.mark.parametrize("stream", [b"data: " + b"x" * 2000, b"data: x\n" * 400])
def test_an_event_without_an_end_is_given_up(stream):
    with pytest.raises(ProtocolError, match="more than 1000 bytes"):
        list(SseParser(1000).feed(stream))
