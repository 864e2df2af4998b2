"""Metrics of chat models: rendered at most once a second."""

from trimtab_model_servers.server.chat_metrics import CachedExposition


def test_metrics_are_rendered_at_most_once_a_second():
    texts = iter((b"first", b"second", b"third"))
    metrics = CachedExposition(lambda: next(texts))

    assert [metrics.at(now) for now in (10.0, 10.0, 10.999, 11.0, 11.5, 60.0)] == [
        *(b"first", b"first", b"first"),
        *(b"second", b"second", b"third"),
    ]
