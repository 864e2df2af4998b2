"""Synthetic payloads: lengths of the published data sets, uniform padding, and reproducible seeds."""

import numpy as np
import pytest

from trimtab_pipelines.synthetic_inputs import DISTRIBUTIONS, draw_inputs, parse_distributions
from trimtab_pipelines.tensors import TensorSpec

TEXT = TensorSpec(name="text", datatype="INT64", shape=(-1,))
AUDIO = TensorSpec(name="audio", datatype="FP32", shape=(-1,))
AUDIO_LENGTH = TensorSpec(name="audio_length", datatype="INT64")
IMAGE = TensorSpec(name="image", datatype="UINT8", shape=(3, 8, 8))
SPECS = (TEXT, AUDIO, AUDIO_LENGTH, IMAGE)


@pytest.mark.parametrize("law", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_lengths_have_the_published_mean(law):
    unit = 1 if law.kind == "tokens" else 16_000
    lengths = law.lengths(20_000, np.random.default_rng(1)) / unit

    assert lengths.min() >= law.least
    assert lengths.max() <= law.most
    uncut = lengths < law.most
    assert law.mean * 0.7 < lengths.mean() < law.mean * 1.02
    assert np.log(lengths[uncut]).std() > 0.2


def test_tokens_are_padded_to_one_width():
    rows = draw_inputs({"text": "newstest-french"}, SPECS, 50, (1,))["text"]

    assert rows.shape == (50, 128)
    lengths = (rows >= 0).sum(axis=1)
    assert len(set(lengths)) > 10
    for row, length in zip(rows, lengths, strict=True):
        assert (row[:length] >= 1000).all()
        assert (row[length:] == -1).all()


def test_sound_is_padded_with_silence():
    drawn = draw_inputs({"audio": "librispeech"}, SPECS, 6, (1,))

    assert drawn["audio"].shape == (6, 240_000)
    assert drawn["audio"].dtype == np.float32
    for row, length in zip(drawn["audio"], drawn["audio_length"], strict=True):
        assert np.count_nonzero(row[:length]) > 0.99 * length
        assert not row[length:].any()


def test_inputs_depend_on_the_seed_only():
    laws = {"text": "xsum-article", "image": "noise"}
    first, same, other = (draw_inputs(laws, SPECS, 2, seed) for seed in ((1, 7), (1, 7), (1, 8)))

    assert first.keys() == laws.keys()
    assert all(np.array_equal(first[name], same[name]) for name in laws)
    assert not any(np.array_equal(first[name], other[name]) for name in laws)


def test_noise_covers_the_pixel_range():
    pixels = draw_inputs({"image": "noise"}, SPECS, 20, (0,))["image"]

    assert pixels.shape == (20, 3, 8, 8)
    assert (pixels.min(), pixels.max()) == (0, 255)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("texts=xsum-article", "unknown input 'texts'"),
        ("text=xsum", "unknown distribution 'xsum'"),
        ("audio=xsum-article", r"the input must be INT64 \[-1\], not FP32 \[-1\]"),
        ("text=librispeech", r"the input must be FP32 \[-1\], not INT64 \[-1\]"),
        ("text=noise", r"the input must be UINT8 of a fixed shape, not INT64 \[-1\]"),
    ],
)
def test_invalid_payloads_are_rejected(written, message):
    with pytest.raises(ValueError, match=message):
        parse_distributions(written, SPECS)
