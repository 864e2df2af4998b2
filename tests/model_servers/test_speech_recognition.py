"""Speech recognition: features equal the pretrained extractor's, padding is ignored."""

from itertools import groupby

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from tests.model_servers.test_transformers import SMALL_BART, a_small, run
from trimtab_model_servers.families.filterbank import mel_bands
from trimtab_model_servers.families.pretrained import construct
from trimtab_model_servers.families.speech_recognition import (
    FrameReader,
    Transcriber,
    collapse_repeats,
    pad_audio,
    standardize,
)
from trimtab_model_servers.families.text import generation_config

SMALL_SPEECH = SMALL_BART | {"conv_channels": 32, "vocab_size": 50}
SMALL_WAVE = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "conv_dim": (32,) * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}


def a_clip(samples: int, seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    wave = torch.sin(torch.arange(samples) * 0.05 * seed) * 0.3
    return wave + 0.05 * torch.randn(samples)


def clips(*samples: int, width: int) -> dict[str, torch.Tensor]:
    """Clips of these lengths; what lies beyond is loud, so that a test fails where it is heard."""
    audio = torch.ones(len(samples), width)
    for row, length in enumerate(samples):
        audio[row, :length] = a_clip(length, seed=length % 7 + 1)
    return {"audio": audio, "audio_length": torch.tensor(samples)}


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    torch.manual_seed(1)
    model = construct(a_small("s2t-small", **SMALL_SPEECH))
    return Transcriber(model, max_samples=16_000, generation_config=generation_config(model, 5, 1, random=True))


@pytest.fixture(scope="module")
def frame_reader() -> FrameReader:
    torch.manual_seed(2)
    model = construct(a_small("wav2vec2-base", vocab_size=32, **SMALL_WAVE))
    return FrameReader(model, max_samples=16_000, max_new_tokens=20, blank=0)


def test_bands_equal_the_pretrained_feature_extractor():
    extractor = transformers.Speech2TextFeatureExtractor()
    lengths = (8000, 5000)
    rows = clips(*lengths, width=8000)
    expected = extractor(
        [rows["audio"][n, :length].numpy() for n, length in enumerate(lengths)],
        sampling_rate=16_000,
        return_tensors="pt",
        padding=True,
        return_attention_mask=True,
    )
    bands, mask = mel_bands(*pad_audio(rows["audio"], rows["audio_length"], 16_000))

    assert torch.equal(mask, expected["attention_mask"].to(torch.int64))
    inside = mask.bool()
    assert torch.allclose(bands[inside], expected["input_features"][inside], atol=1e-3)
    assert not bands[~inside].any()


def test_padding_and_audio_above_the_limit_are_not_read():
    audio, samples = pad_audio(torch.ones(3, 2000), torch.tensor([1000, 5000, 0]), max_samples=1500)

    assert samples.tolist() == [1000, 1500, 400]
    assert audio.sum(dim=1).tolist() == [1000, 1500, 400]
    assert pad_audio(torch.ones(1, 1), torch.tensor([0]), max_samples=1500)[0].shape == (1, 400)


def test_clip_is_standardized_by_its_own_samples():
    rows = clips(900, 400, width=1000)
    audio, samples = pad_audio(rows["audio"], rows["audio_length"], 1000)
    waves = standardize(audio, samples)

    for wave, length in zip(waves, samples, strict=True):
        assert wave[:length].mean().item() == pytest.approx(0, abs=1e-5)
        assert wave[:length].std(unbiased=False).item() == pytest.approx(1, rel=1e-3)
        assert not wave[length:].any()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_collapse_joins_neighbors_then_drops_blanks(letters):
    tokens = collapse_repeats(torch.tensor([letters]), blank=0)[0].tolist()

    assert tokens == [letter for letter, _ in groupby(letters) if letter]


def test_transcription_does_not_depend_on_other_rows(transcriber):
    together = run(transcriber, **clips(6000, 3000, width=16_000))["tokens"]
    beside = run(transcriber, **clips(3000, 5999, 6000, width=6000))["tokens"]

    assert together.shape == (2, 5)
    assert torch.equal(together[1], beside[0])


def test_letters_are_read_from_own_frames(frame_reader):
    rows = clips(8000, 8000, 8000, 8000, 8000, width=16_000)  # more than are computed at once
    tokens = run(frame_reader, **rows)["tokens"]
    shorter = run(frame_reader, **clips(8000, width=8000))["tokens"]

    assert tokens.shape == (5, 20)
    assert (tokens == shorter[0]).all()
    assert (tokens[0] > 0).any()
    assert ((tokens == -1) | (tokens > 0)).all()


@pytest.mark.parametrize("family", ["transcriber", "frame_reader"])
def test_the_shortest_input_runs(family, request):
    audio, length = torch.zeros(1, 1), torch.zeros(1).long()

    assert run(request.getfixturevalue(family), audio=audio, audio_length=length)["tokens"].shape[0] == 1
