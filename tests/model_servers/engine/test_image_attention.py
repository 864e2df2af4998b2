"""Cross-attention mask: equal to that of Mllama's own processor."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.model_servers.engine.models import IMAGE_ID, mllama_processing
from trimtab_model_servers.engine.image_attention import image_attention_mask
from trimtab_model_servers.engine.request import Image

PROMPTS = st.lists(st.sampled_from([IMAGE_ID, 7, 8]), min_size=1, max_size=14)


@given(PROMPTS)
def test_mask_equals_the_processors(prompt):
    places = [place for place, token in enumerate(prompt) if token == IMAGE_ID]
    images = [Image(f"{place}", place, 1, tokens=1, padding=1) for place in places]
    mask = image_attention_mask(len(prompt), images)
    seen = np.zeros((len(prompt), len(places)), dtype=bool)
    if places:
        sparse = mllama_processing.get_cross_attention_token_mask(prompt, IMAGE_ID)
        dense = mllama_processing.convert_sparse_cross_attention_mask_to_dense(
            [sparse], [[1] * len(places)], 1, len(prompt)
        )
        seen = dense[0, :, :, 0].astype(bool)

    for place in range(len(prompt)):
        low, high, behind = (column[0] for column in mask.at(place, 1))
        assert behind == seen[place].any()
        wanted = np.flatnonzero(seen[place]).tolist() if behind else list(range(max(2 * len(places), 1)))
        assert list(range(low, high)) == wanted
    assert [column[0] for column in mask.at(99, 1)] == [
        column[-1] for column in (mask.low, mask.high, mask.after_image)
    ]
