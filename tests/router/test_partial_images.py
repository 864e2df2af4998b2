"""References of partly encoded chats, and image identities."""

import json
from hashlib import sha256

import numpy as np
import pytest

from tests.router.disaggregated import ROWS, a_picture, reported_references, shown_by
from trimtab_protocol.chat.embedding_refs import EmbeddingRef, EncodedImage
from trimtab_protocol.chat.internal_wire import content_id, encoder_of_content
from trimtab_router.execution import chat_images
from trimtab_router.execution.chat_images import ImageSizeCache, PartialImages, arrived_images_body

URL = "http://encoder:9000/v2/models/encode/embeddings/a-0"


def came(*files):
    return chat_images.addressed_references(
        reported_references(np.array([[file] for file in files], dtype=object)), [URL] * len(files)
    )


def known():
    sizes = ImageSizeCache()
    PartialImages([a_picture(9)], sizes).add(0, came(a_picture(9)))
    return sizes


def test_images_of_a_known_size_are_announced():
    files = [a_picture(number) for number in range(3)]
    images = PartialImages(files, known())
    assert not images.has_first
    images.add(0, came(files[0]))
    assert images.has_first

    (references,) = images.references()
    first, *others = json.loads(references)
    assert first["digest"] == shown_by(files[0])
    assert others == [{"url": "pending:", "rows": ROWS, "digest": shown_by(file)} for file in files[1:]]
    new = images.add(0, came(*files[:2]))
    assert list(new) == [1]
    assert json.loads(arrived_images_body(new)) == [
        {"image": 1, "url": URL, "rows": ROWS, "digest": shown_by(files[1])}
    ]
    assert json.loads(images.references()[0])[1] == {"url": URL, "rows": ROWS, "digest": shown_by(files[1])}
    assert not images.complete
    images.add(2, came(files[2]))
    assert images.complete


def test_tiled_image_is_announced_with_its_columns():
    files = [a_picture(1), a_picture(2)]
    cut = EmbeddingRef(url=URL, rows=ROWS, columns=3, digest=shown_by(files[0])).json_bytes()
    images = PartialImages(files, ImageSizeCache())
    images.add(0, np.array([cut], dtype=object))

    announced = images.references()
    assert announced is not None
    assert [one["columns"] for one in json.loads(announced[0])] == [3, 3]
    assert json.loads(arrived_images_body({0: cut}))[0]["columns"] == 3


@pytest.mark.parametrize("file", [b"no image", a_picture(1)[:20], b""])
def test_what_has_no_known_size_is_not_announced(file):
    images = PartialImages([a_picture(1), file], known())
    images.add(0, came(a_picture(1)))
    assert images.references() is None
    anonymous = PartialImages([a_picture(1), a_picture(2)], known())
    anonymous.add(0, np.array([b'{"rows": 4}'], dtype=object))
    assert anonymous.references() is None


def test_sizes_that_were_seen_longest_ago_are_forgotten():
    sizes = ImageSizeCache(max_sizes=1)
    sizes.record("one", a_picture(1), EncodedImage(rows=4))
    sizes.record("other", a_picture(1), EncodedImage(rows=5))
    assert (sizes.lookup("one", a_picture(2)), len(sizes)) == (None, 1)
    assert sizes.lookup("other", a_picture(2)) == EncodedImage(rows=5)


def test_image_digest_includes_its_encoder():
    digest = sha256(b"file").hexdigest()
    assert encoder_of_content(content_id("family:path", digest, 4)) == "family:path"
    assert encoder_of_content("") == encoder_of_content("a:b") == ""


def rows_of(chats, options=None):
    given = {"images": np.array(chats, dtype=object)}
    if options is not None:
        given["options"] = np.array(options, dtype=object)
    return chat_images.image_identities(chat_images.fan_out_images(given))


def test_image_identity_covers_file_tenant_and_company():
    one, other = rows_of([[b"a", b"b"], [b"b", b"a"]], [b'{"tenant": "x", "seed": 1}', b'{"seed": 2, "tenant": "x"}'])[
        :2
    ]
    assert one != other
    same = rows_of([[b"a", b"b"], [b"b", b"a"]])
    assert (same[0], same[1]) == (same[3], same[2])
    strange = rows_of([[b"a", b"b"]], [b'{"tenant": "y"}'])
    assert strange[0] != same[0]
    assert rows_of([[b"a"]])[0] != same[0]
    assert rows_of([[b"a", b"b"]], [b"{"]) == rows_of([[b"a"]], [b"[]"]) == ()
