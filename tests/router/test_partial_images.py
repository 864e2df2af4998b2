"""What can be told of a chat's images while some are still encoded, and what rows show; without a network."""

import json
from hashlib import sha256

import numpy as np
import pytest

from tests.router.parted import ROWS, a_picture, shown_by, told
from trimtab_protocol.chat.embedding_refs import EmbeddingRef, EncodedImage
from trimtab_protocol.chat.internal_wire import content_of, encoder_of
from trimtab_router.request import image_fanout
from trimtab_router.request.partial_images import ImageSizeCache, PartialImages, numbered

URL = "http://encoder:9000/v2/models/encode/embeddings/a-0"


def came(*files):
    return image_fanout.addressed_references(
        told(np.array([[file] for file in files], dtype=object)), [URL] * len(files)
    )


def known():
    """Sizes of pictures, learnt from one."""
    sizes = ImageSizeCache()
    PartialImages([a_picture(9)], sizes).came(0, came(a_picture(9)))
    return sizes


def test_images_of_a_known_size_are_announced_as_they_will_be_told():
    files = [a_picture(number) for number in range(3)]
    ahead = PartialImages(files, known())
    assert not ahead.begun
    ahead.came(0, came(files[0]))
    assert ahead.begun

    (references,) = ahead.references()
    first, *others = json.loads(references)
    assert first["digest"] == shown_by(files[0])
    assert others == [{"url": "awaited:", "rows": ROWS, "digest": shown_by(file)} for file in files[1:]]
    new = ahead.came(0, came(*files[:2]))
    assert list(new) == [1]
    assert json.loads(numbered(new)) == [{"image": 1, "url": URL, "rows": ROWS, "digest": shown_by(files[1])}]
    assert json.loads(ahead.references()[0])[1] == {"url": URL, "rows": ROWS, "digest": shown_by(files[1])}
    assert not ahead.whole
    ahead.came(2, came(files[2]))
    assert ahead.whole


def test_an_image_that_is_cut_into_tiles_is_announced_in_as_many_columns():
    files = [a_picture(1), a_picture(2)]
    cut = EmbeddingRef(url=URL, rows=ROWS, columns=3, digest=shown_by(files[0])).json_bytes()
    ahead = PartialImages(files, ImageSizeCache())
    ahead.came(0, np.array([cut], dtype=object))

    announced = ahead.references()
    assert announced is not None
    assert [one["columns"] for one in json.loads(announced[0])] == [3, 3]
    assert json.loads(numbered({0: cut}))[0]["columns"] == 3


@pytest.mark.parametrize("file", [b"no image", a_picture(1)[:20], b""])
def test_what_has_no_known_size_is_not_announced(file):
    ahead = PartialImages([a_picture(1), file], known())
    ahead.came(0, came(a_picture(1)))
    assert ahead.references() is None


def test_nothing_is_announced_of_an_encoder_that_does_not_say_who_it_is():
    sizes, files = known(), [a_picture(1), a_picture(2)]
    ahead = PartialImages(files, sizes)
    ahead.came(0, np.array([b'{"rows": 4}'], dtype=object))
    assert ahead.references() is None


def test_sizes_that_were_seen_longest_ago_are_forgotten():
    sizes = ImageSizeCache(most=1)
    sizes.note("one", a_picture(1), EncodedImage(rows=4))
    sizes.note("other", a_picture(1), EncodedImage(rows=5))
    assert (sizes.made("one", a_picture(2)), len(sizes)) == (None, 1)
    assert sizes.made("other", a_picture(2)) == EncodedImage(rows=5)


def test_what_an_image_shows_says_who_encoded_it():
    digest = sha256(b"file").hexdigest()
    assert encoder_of(content_of("family:path", digest, 4)) == "family:path"
    assert encoder_of("") == encoder_of("a:b") == ""


def rows_of(chats, options=None):
    given = {"images": np.array(chats, dtype=object)}
    if options is not None:
        given["options"] = np.array(options, dtype=object)
    return image_fanout.identities(image_fanout.fan_out_images(given))


def test_rows_are_alike_that_show_the_same_to_the_same_tenant_and_are_alone_or_not():
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
