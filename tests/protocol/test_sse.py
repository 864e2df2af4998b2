"""`SseParser`: server-sent events, independent of chunk boundaries."""

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
def test_events_do_not_depend_on_chunking(cuts):
    reader, edges = SseParser(), [0, *sorted(cuts), len(STREAM)]
    events = [event for start, stop in pairwise(edges) for event in reader.feed(STREAM[start:stop])]

    assert events == EVENTS


@pytest.mark.parametrize("stream", [b"data: " + b"x" * 2000, b"data: x\n" * 400])
def test_unbounded_event_is_rejected(stream):
    with pytest.raises(ProtocolError, match="more than 1000 bytes"):
        list(SseParser(1000).feed(stream))
