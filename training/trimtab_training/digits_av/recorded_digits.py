"""Spoken digits of real speakers from a folder of data, where there is one.

The file is `fsdd_dev.npz`: clips of the Free Spoken Digit Dataset (CC BY-SA 4.0), 8 kHz, as `samples` (int16, end to
end), `offsets`, `digit`, `speaker` and `speaker_names`. What is trained on them carries their licence.
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
    """Clips of some speakers.

    Attributes:
        clips: float32 samples at 8 kHz, mean 0, peak 1, each of its own length.
        digits: what is said, int64 [n].
        speakers: who says it, indices into `names`, int64 [n].
        names: of all speakers.
        source: the name of the file they come from.
    """

    clips: tuple[NDArray[np.float32], ...]
    digits: NDArray[np.int64]
    speakers: NDArray[np.int64]
    names: tuple[str, ...]
    source: str

    @property
    def present(self) -> tuple[str, ...]:
        """The speakers there are clips of, in order."""
        return tuple(self.names[n] for n in sorted(set(self.speakers.tolist())))

    def of(self, *names: str) -> "Recordings":
        """Only those of some speakers; KeyError names the ones there are."""
        unknown = sorted(set(names) - set(self.names))
        if unknown:
            raise KeyError(f"no speaker {unknown[0]!r} in these recordings; there are: {', '.join(self.names)}")
        kept = np.flatnonzero(np.isin(self.speakers, [self.names.index(name) for name in names]))
        return Recordings(
            tuple(self.clips[n] for n in kept), self.digits[kept], self.speakers[kept], self.names, self.source
        )


def training_speakers(recordings: Recordings) -> tuple[str, ...]:
    """The speakers that weights to be shipped learn from: all but the last, whom they are tried with.

    Raises:
        ValueError: there are fewer than two.
    """
    *taught, _ = recordings.present or ("nobody",)
    if not taught:
        raise ValueError(
            f"{recordings.source}: recordings of {', '.join(recordings.present) or 'nobody'} alone; give those of two "
            "speakers at least: each is judged by weights that learned from the others"
        )
    return tuple(taught)


def held_out_speakers(recordings: Recordings, heard: Collection[str]) -> tuple[str, ...]:
    """The speakers that weights have not learned from.

    Args:
        recordings: of these speakers and others.
        heard: whom the weights have learned from.

    Raises:
        ValueError: there is none.
    """
    found = tuple(name for name in recordings.present if name not in heard)
    if not found:
        raise ValueError(
            f"the weights have learned from every speaker of these recordings ({', '.join(recordings.present)}); "
            "name some to take them all the same, or give recordings of others"
        )
    return found


def load_recordings(path: Path) -> Recordings:
    """Read a file of recordings, or the one in a folder.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is no such file.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no recordings there; give {FILE} or the folder that holds it")
    with np.load(file, allow_pickle=False) as held:
        missing = sorted({"samples", "offsets", "digit", "speaker", "speaker_names"} - set(held.files))
        if missing:
            raise ValueError(f"{file}: no array {missing[0]!r}; are these recordings of spoken digits?")
        samples, offsets = held["samples"], held["offsets"]
        clips = tuple(_levelled(samples[a:b]) for a, b in pairwise(offsets.tolist()))
        names = tuple(str(name) for name in held["speaker_names"])
        return Recordings(clips, held["digit"].astype(np.int64), held["speaker"].astype(np.int64), names, file.name)


def _levelled(samples: NDArray[np.int16]) -> NDArray[np.float32]:
    centred = samples.astype(np.float32) - np.float32(samples.mean())
    return centred / np.float32(max(float(np.abs(centred).max()), 1.0))
