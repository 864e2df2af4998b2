"""Spoken sums: results, determinism and disjoint splits."""

import io

import numpy as np
import pytest
import soundfile

from trimtab_training.spoken_sums.dataset import WORDS, EvaluationSums, SumSource, draw_words, evaluate, split_of


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("seven plus five minus two", 10),
        ("two plus three times four", 14),
        ("nine times nine minus two times three", 75),
    ],
)
def test_result_of_a_sum_multiplies_first(text, result):
    assert evaluate([WORDS.index(word) for word in text.split()]) == result


def test_splits_share_no_sum_of_three_digits():
    drawn = {}
    for split in ("train", "held-out"):
        random = np.random.default_rng(5)
        drawn[split] = {draw_words(split, random) for _ in range(2_000)}
    shared = drawn["train"] & drawn["held-out"]

    assert {len(words) for words in shared} == {3}
    assert all(split_of(words) == split for split, found in drawn.items() for words in found - shared if len(words) > 3)


def test_sums_depend_on_index_seed_and_split_only():
    first = SumSource("held-out", seed=3).spoken(7)
    again = SumSource("held-out", seed=3).spoken(7)
    others = [
        SumSource("held-out", seed=3).spoken(8),
        SumSource("held-out", 4).spoken(7),
        SumSource("train", 3).spoken(7),
    ]
    samples, rate_hz = soundfile.read(io.BytesIO(first.wav()), dtype="float32")

    assert (first.words, first.audio.tobytes()) == (again.words, again.audio.tobytes())
    assert all(first.audio.tobytes() != other.audio.tobytes() for other in others)
    assert (rate_hz, first.result) == (8_000, evaluate(first.words))
    assert samples == pytest.approx(first.audio, abs=1e-4)
    assert set(first.text.split()) <= set(WORDS)


def test_evaluation_samples_are_wav_files_with_results():
    samples = EvaluationSums()
    inputs, truth = samples[len(samples) - 1]

    assert inputs["audio"].startswith(b"RIFF")
    assert 0 <= int(truth["label"]) < 100
