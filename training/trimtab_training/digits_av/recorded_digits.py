"""Recorded digits of real speakers, from the optional file `fsdd_dev.npz`.

The file holds clips of the Free Spoken Digit Dataset (CC BY-SA 4.0) at 8 kHz: `samples` (int16, concatenated),
`offsets`, `digit`, `speaker` and `speaker_names`. The licence applies to weights trained on them.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

FILE: Final = "fsdd_dev.npz"


@dataclass(frozen=True, slots=True, eq=False)
class Recordings:
    """Clips of some speakers."""

    clips: tuple[NDArray[np.float32], ...]
    """Samples at 8 kHz, mean 0, peak 1; lengths differ."""
    digits: NDArray[np.int64]
    """[n], the spoken digit."""
    speakers: NDArray[np.int64]
    """[n], indices into `names`."""
    names: tuple[str, ...]
    """All speakers of the file."""
    source: str
    """Name of the file."""

    @property
    def present(self) -> tuple[str, ...]:
        """Speakers with clips, in order."""
        return tuple(self.names[n] for n in sorted(set(self.speakers.tolist())))

    def of(self, *names: str) -> "Recordings":
        """Clips of some speakers; KeyError if one is unknown."""
        unknown = sorted(set(names) - set(self.names))
        if unknown:
            raise KeyError(f"no speaker {unknown[0]!r} in these recordings; speakers: {', '.join(self.names)}")
        rows = np.flatnonzero(np.isin(self.speakers, [self.names.index(name) for name in names]))
        return Recordings(
            tuple(self.clips[row] for row in rows), self.digits[rows], self.speakers[rows], self.names, self.source
        )


def training_speakers(recordings: Recordings) -> tuple[str, ...]:
    """Speakers that the shipped weights are trained on: all but the last.

    Raises:
        ValueError: there are fewer than two speakers.
    """
    speakers = recordings.present
    if len(speakers) < 2:
        raise ValueError(
            f"{recordings.source}: recordings of {len(speakers)} speakers; at least two are needed, because each is "
            "measured with weights trained on the others"
        )
    return speakers[:-1]


def held_out_speakers(recordings: Recordings, trained: Collection[str]) -> tuple[str, ...]:
    """Speakers that weights were not trained on; ValueError if there are none."""
    speakers = tuple(name for name in recordings.present if name not in trained)
    if not speakers:
        raise ValueError(
            f"the weights were trained on every speaker of these recordings ({', '.join(recordings.present)}); "
            "name the speakers to use, or give recordings of others"
        )
    return speakers


def load_recordings(path: Path) -> Recordings:
    """Read a file of recordings, or the one in a folder.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: the file lacks an array.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no recordings; give {FILE} or the folder that holds it")
    with np.load(file, allow_pickle=False) as arrays:
        missing = sorted({"samples", "offsets", "digit", "speaker", "speaker_names"} - set(arrays.files))
        if missing:
            raise ValueError(f"{file}: no array {missing[0]!r}; it should be a file of spoken digits")
        samples, offsets = arrays["samples"], arrays["offsets"]
        clips = tuple(_normalize(samples[a:b]) for a, b in pairwise(offsets.tolist()))
        names = tuple(str(name) for name in arrays["speaker_names"])
        return Recordings(clips, arrays["digit"].astype(np.int64), arrays["speaker"].astype(np.int64), names, file.name)


def _normalize(samples: NDArray[np.int16]) -> NDArray[np.float32]:
    centred = samples.astype(np.float32) - np.float32(samples.mean())
    return centred / np.float32(max(float(np.abs(centred).max()), 1.0))
