"""Items of digits-av: determinism, shapes and disjoint splits."""

import numpy as np
import pytest

from trimtab_training.digits_av.dataset import (
    FILE,
    NAMES,
    ItemSource,
    held_out_speakers,
    load_recordings,
    synthesize_text,
    training_speakers,
)
from trimtab_training.digits_av.formant_synthesis import VOICES, synthesize_word, voice

SPEAKERS = ("george", "jackson", "lucas", "nicolas")


def bytes_of(items):
    return [array.tobytes() for array in items.inputs().values()]


def a_recording_file(folder, names):
    """Tones of another pitch for each digit, as a file of recordings has them: one clip a digit and speaker."""
    clips, digits, speakers = [], [], []
    for speaker in range(len(names)):
        for digit in range(10):
            clips.append((8000 * np.sin(np.arange(2000 + 100 * speaker) * 0.1 * (digit + 1)) - 200).astype(np.int16))
            digits.append(digit)
            speakers.append(speaker)
    offsets = np.concatenate([[0], np.cumsum([clip.size for clip in clips])])
    np.savez(
        folder / FILE,
        samples=np.concatenate(clips),
        offsets=offsets,
        digit=np.array(digits, np.uint8),
        speaker=np.array(speakers, np.uint8),
        speaker_names=np.array(names),
    )
    return folder


def test_items_depend_on_index_seed_and_split_only():
    source = ItemSource("held-out", seed=3)
    first = source.items(0, 4)

    assert bytes_of(ItemSource("held-out", seed=3).items(0, 4)) == bytes_of(first)
    assert bytes_of(source.items(2, 1))[0] == first.audio[2:3].tobytes()
    for other in (source.items(4, 4), ItemSource("held-out", 4).items(0, 4), ItemSource("train", 3).items(0, 4)):
        assert all(ours != theirs for ours, theirs in zip(bytes_of(first), bytes_of(other), strict=True))


def test_parts_share_no_handwriting():
    parts = [ItemSource("held-out", seed=1, part=(which, 3)) for which in range(3)]
    images = [[set(of_digit) for of_digit in source.glyphs_of_digit] for source in parts]

    for digit in range(10):
        own = [part[digit] for part in images]
        assert sum(map(len, own)) == len(set.union(*own)) > 100
    assert not np.array_equal(parts[0].items(0, 1).video, parts[1].items(0, 1).video)


def test_items_have_shapes_and_all_digits():
    items = ItemSource("held-out", seed=1).items(0, 60)

    assert (str(items.audio.dtype), items.audio.shape) == ("int16", (60, 6400))
    assert (str(items.video.dtype), items.video.shape) == ("uint8", (60, 4, 24, 24))
    assert (str(items.text.dtype), items.text.shape) == ("uint8", (60, 6))
    assert set(items.digit.tolist()) == set(range(10))
    assert np.abs(items.audio.astype(np.int32)).max(axis=1).min() > 1_500


def test_text_is_the_name_or_a_hint():
    random = np.random.default_rng(0)
    words = [bytes(synthesize_text(7, random)).rstrip(b"\0").decode() for _ in range(400)]
    right = [word for word in words if word in {"seven", "odd", "high"}]

    assert len(right) > 0.4 * len(words)
    assert {"seven", "odd", "high"} <= set(words)
    assert not set(words) & {name for name in NAMES if name != "seven"}


def test_splits_share_no_voice_and_takes_differ():
    assert set(range(*VOICES["train"])).isdisjoint(range(*VOICES["held-out"]))
    speaker = voice(VOICES["train"][0])
    first, second = (synthesize_word(6, speaker, np.random.default_rng(take)) for take in range(2))

    assert 0.1 < first.size / 8000 < 1.2
    assert np.abs(first).max() == pytest.approx(1.0)
    assert first.size != second.size


def test_recordings_are_normalized_and_selected_by_speaker(tmp_path):
    recordings = load_recordings(a_recording_file(tmp_path, [*SPEAKERS, "ada"]))

    assert recordings.present == (*SPEAKERS, "ada")
    assert training_speakers(recordings) == SPEAKERS
    assert held_out_speakers(recordings, SPEAKERS) == ("ada",)
    ada = recordings.of("ada")
    assert set(ada.digits.tolist()) == set(range(10))
    assert all(abs(float(clip.mean())) < 1e-3 and clip.max() <= 1.0 for clip in ada.clips)
    items = ItemSource("held-out", 1, ada).items(0, 3)
    assert bytes_of(items)[0] != bytes_of(ItemSource("held-out", 1).items(0, 3))[0]
    with pytest.raises(KeyError, match="no speaker 'absent' in these recordings"):
        recordings.of("absent")
    with pytest.raises(ValueError, match="trained on every speaker of these recordings"):
        held_out_speakers(recordings.of(*SPEAKERS), SPEAKERS)


def test_file_without_recordings_is_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="no recordings"):
        load_recordings(tmp_path)
    np.savez(tmp_path / FILE, samples=np.zeros(3, np.int16))
    with pytest.raises(ValueError, match="no array 'digit'"):
        load_recordings(tmp_path)
