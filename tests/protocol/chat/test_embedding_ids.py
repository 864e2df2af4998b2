"""Embedding ids: names of stored embeddings, of a batch and of one image."""

from trimtab_protocol.chat.internal_wire import embedding_id, expand_embedding_ids, group_embedding_urls

ONE, OTHER = (f"http://lmm-{pod}:9000/v2/models/encode-small/embeddings" for pod in "ab")


def test_embedding_urls_of_a_batch_are_grouped():
    urls = [f"{ONE}/k-0", f"{OTHER}/j-1", f"{ONE}/k-12", f"{ONE}/l-0", f"{OTHER}/j-0"]

    assert group_embedding_urls(urls) == {f"{ONE}/k-0,12": [0, 2], f"{OTHER}/j-1,0": [1, 4], f"{ONE}/l-0": [3]}


def test_url_without_row_is_unchanged():
    urls = [f"{ONE}/gone", "http://a-1:9/b"]
    assert group_embedding_urls(urls) == {urls[0]: [0], urls[1]: [1]}


def test_grouped_ids_expand_to_embedding_ids():
    assert expand_embedding_ids("a-b-0,3") == [embedding_id("a-b", 0), embedding_id("a-b", 3)]
    assert [expand_embedding_ids(name) for name in ("k-7", "gone", "-3", "k-", "k-1,", "k-x")] == [
        ["k-7"],
        ["gone"],
        ["-3"],
        ["k-"],
        ["k-1,"],
        ["k-x"],
    ]
