"""What replicas tell of their chats: written no more often than it changes for whoever reads it."""

from trimtab_model_servers.chat_metrics import Page


def test_a_page_is_written_once_a_second_however_often_it_is_asked_for():
    written = iter((b"first", b"second", b"third"))
    page = Page(lambda: next(written))

    assert [page.at(now) for now in (10.0, 10.0, 10.999, 11.0, 11.5, 60.0)] == [
        *(b"first", b"first", b"first"),
        *(b"second", b"second", b"third"),
    ]
