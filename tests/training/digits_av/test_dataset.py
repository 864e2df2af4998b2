"""Items: the same each time they are drawn, of the shapes promised, and no source of one split in another."""

import numpy as np
import pytest

from trimtab_training.digits_av.dataset import NAMES, ItemSource, synthesize_text
from trimtab_training.digits_av.formant_synthesis import VOICES, synthesize_word, voice
from trimtab_training.digits_av.recorded_digits import FILE, held_out_speakers, load_recordings, training_speakers

HEARD = ("george", "jackson", "lucas", "nicolas")


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


def test_items_are_the_same_each_time_and_differ_by_index_seed_and_split():
    source = ItemSource("held-out", seed=3)
    whole = source.items(0, 4)

    assert bytes_of(ItemSource("held-out", seed=3).items(0, 4)) == bytes_of(whole)
    assert bytes_of(source.items(2, 1))[0] == whole.audio[2:3].tobytes()
    for other in (source.items(4, 4), ItemSource("held-out", 4).items(0, 4), ItemSource("train", 3).items(0, 4)):
        assert all(mine != its for mine, its in zip(bytes_of(whole), bytes_of(other), strict=True))


def test_no_image_of_handwriting_is_in_two_parts():
    parts = [ItemSource("held-out", seed=1, part=(which, 3)) for which in range(3)]
    images = [[set(of_digit) for of_digit in source._written] for source in parts]

    for digit in range(10):
        own = [part[digit] for part in images]
        assert sum(map(len, own)) == len(set.union(*own)) > 100
    assert not np.array_equal(parts[0].items(0, 1).video, parts[1].items(0, 1).video)


def test_items_keep_their_promises():
    items = ItemSource("held-out", seed=1).items(0, 60)

    assert (str(items.audio.dtype), items.audio.shape) == ("int16", (60, 6400))
    assert (str(items.video.dtype), items.video.shape) == ("uint8", (60, 4, 24, 24))
    assert (str(items.text.dtype), items.text.shape) == ("uint8", (60, 6))
    assert set(items.digit.tolist()) == set(range(10))
    assert np.abs(items.audio.astype(np.int32)).max(axis=1).min() > 1_500


def test_text_names_the_digit_or_hints_at_it():
    random = np.random.default_rng(0)
    words = [bytes(synthesize_text(7, random)).rstrip(b"\0").decode() for _ in range(400)]
    right = [word for word in words if word in {"seven", "odd", "high"}]

    assert len(right) > 0.4 * len(words)
    assert {"seven", "odd", "high"} <= set(words)
    assert not set(words) & {name for name in NAMES if name != "seven"}


def test_voices_of_the_splits_differ_and_each_takes_a_word_anew():
    assert set(range(*VOICES["train"])).isdisjoint(range(*VOICES["held-out"]))
    speaker = voice(VOICES["train"][0])
    one, other = (synthesize_word(6, speaker, np.random.default_rng(take)) for take in range(2))

    assert 0.1 < one.size / 8000 < 1.2
    assert np.abs(one).max() == pytest.approx(1.0)
    assert one.size != other.size


def test_recordings_are_levelled_and_chosen_by_speaker(tmp_path):
    found = load_recordings(a_recording_file(tmp_path, [*HEARD, "stranger"]))

    assert found.present == (*HEARD, "stranger")
    assert training_speakers(found) == HEARD
    assert held_out_speakers(found, HEARD) == ("stranger",)
    chosen = found.of("stranger")
    assert set(chosen.digits.tolist()) == set(range(10))
    assert all(abs(float(clip.mean())) < 1e-3 and clip.max() <= 1.0 for clip in chosen.clips)
    items = ItemSource("held-out", 1, chosen).items(0, 3)
    assert bytes_of(items)[0] != bytes_of(ItemSource("held-out", 1).items(0, 3))[0]
    with pytest.raises(KeyError, match="no speaker 'nobody' in these recordings"):
        found.of("nobody")
    with pytest.raises(ValueError, match="learned from every speaker of these recordings"):
        held_out_speakers(found.of(*HEARD), HEARD)


def test_what_is_no_file_of_recordings_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no recordings there"):
        load_recordings(tmp_path)
    np.savez(tmp_path / FILE, samples=np.zeros(3, np.int16))
    with pytest.raises(ValueError, match="no array 'digit'"):
        load_recordings(tmp_path)
