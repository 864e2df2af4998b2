"""`CandidateArrays` and `OptionArrays`: what candidates and options of one stage are and use, as arrays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.planning.candidate import Candidate
from trimtab_adapter.planning.point_speeds import Floats, Indices, PointSpeeds
from trimtab_pipelines.row_shares import AnsweredBy, mixed_rows


@dataclass(frozen=True, slots=True)
class CandidateArrays:
    """Candidates of one stage with batches of each size; arrays of shape [candidates x sizes that they may have]."""

    listed: Sequence[Candidate]
    number: Indices
    """Of each one's candidate in the list."""
    batch_size: Floats
    rps: Floats
    """Rows per second of one replica."""
    max_rps: Floats
    """The same at the fastest operating point that may run such batches."""
    seconds: Floats
    """Service time of a full batch at the SLO's quantile; of a generation stage, the time to its first tokens."""
    row_seconds: Floats
    """Service time of one row."""
    first_rps: Floats
    """Rows per second whose first tokens one replica computes."""
    accuracy: Floats
    hosted: Indices
    """Number of the variants that the replica hosts; -1 if other points may serve no rows."""
    variants: NDArray[np.str_]
    split_second: Indices
    """Second points of the cascades over two replica groups, which come last and are part of no mix."""

    @classmethod
    def of(cls, listed: Sequence[Candidate], speeds: PointSpeeds) -> Self:
        """Arrays without batches that are too large or too slow.

        A cascade gathers its escalated rows into full batches; a batch's own run after it.
        """
        first, second = np.array([(c.first, c.second) for c in listed], dtype=np.intp).reshape(-1, 2).T
        shares, split = np.array([(c.share, c.is_split) for c in listed]).reshape(-1, 2).T
        alone = {c.first: n for n, c in enumerate(listed) if c.escalation is None}
        again, is_split = second >= 0, split > 0
        rps, seconds = speeds.rps[first], speeds.seconds[first]
        both = again & ~is_split
        rps[both] = 1.0 / (1.0 / rps[both] + shares[both, None] / speeds.rps[second[both]])
        seconds[again] += speeds.escalated_seconds(second[again], shares[again])
        fits = speeds.fits[first] & speeds.in_time[first]
        fits[again] &= speeds.fits[second[again]]
        beside = np.array([alone.get(point, -1) for point in second[is_split].tolist()], dtype=np.intp)
        fits[is_split] &= (beside >= 0)[:, None] & fits[beside]
        number, size = np.nonzero(fits)
        position = np.cumsum(fits).reshape(fits.shape) - 1
        hosts: dict[frozenset[str], int] = {frozenset(): -1}
        hosted = [-1 if c.is_split else hosts.setdefault(c.switchable, len(hosts)) for c in listed]
        return cls(
            listed,
            number,
            speeds.sizes[size],
            rps[fits],
            speeds.max_rps([c.allowed for c in listed])[fits],
            seconds[fits],
            speeds.row_seconds[first][number],
            speeds.first_rps[first][fits],
            np.array([c.accuracy for c in listed])[number],
            np.array(hosted, dtype=np.intp)[number],
            np.array([c.variant.name for c in listed])[number],
            position[beside][fits[is_split]],
        )

    def candidate(self, index: int) -> Candidate:
        return self.listed[int(self.number[index])]


@dataclass(frozen=True, slots=True)
class OptionArrays:
    """Options of one stage; arrays of shape [options], with the indices of their candidates."""

    own: Indices
    """The candidate, the heavier half of a mix, or a cascade."""
    other: Indices
    """The lighter half of a mix, the second point of a cascade over two groups, or `own`."""
    share: Floats
    """Share of a mix's rows that its heavier half serves; else 1."""
    replicas: Floats
    other_replicas: Floats
    """Replicas of the other candidate's group; 0 if one replica hosts both."""

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        each = [[getattr(part, field.name) for field in fields(cls)] for part in parts]
        return cls(*map(np.concatenate, zip(*each, strict=True)))

    def take(self, which: NDArray[np.bool_] | Indices) -> Self:
        return type(self)(*(getattr(self, field.name)[which] for field in fields(self)))

    def with_replicas(self, replicas: float, others: float) -> Self:
        return replace(self, replicas=np.full(self.own.size, replicas), other_replicas=np.full(self.own.size, others))

    @property
    def mixed(self) -> NDArray[np.bool_]:
        """Whether a part of the rows is served by a lighter point."""
        return np.asarray(self.share < 1.0)

    @property
    def least_replicas(self) -> Floats:
        """Replicas of the smaller group."""
        both = np.minimum(self.replicas, self.other_replicas)
        return np.where(self.other_replicas > 0, both, self.replicas)

    def accuracy(self, candidates: CandidateArrays) -> Floats:
        lighter, heavier = candidates.accuracy[self.other], candidates.accuracy[self.own]
        return np.where(self.mixed, lighter + self.share * (heavier - lighter), heavier)

    def seconds(self, candidates: CandidateArrays) -> Floats:
        """Service time of a full batch; of a mix, of its slower half."""
        own, other = candidates.seconds[self.own], candidates.seconds[self.other]
        return np.where(self.mixed, np.maximum(own, other), own)

    def throughput_rps(self, candidates: CandidateArrays) -> Floats:
        """Rows per second of all replicas at the fastest points of their groups; of a cascade, of all first passes."""
        own, other = candidates.max_rps[self.own], candidates.max_rps[self.other]
        hosted = self.replicas * np.where(self.mixed, np.maximum(own, other), own)
        grouped = self.mixed & (self.other_replicas > 0)
        return np.where(grouped, self.replicas * own + self.other_replicas * other, hosted)

    def carried_rps(self, candidates: CandidateArrays) -> Floats:
        """Rows per second that the planned points carry; a mix or cascade over groups turns lighter under a backlog."""
        planned = self.replicas * candidates.rps[self.own]
        return np.where(self.own == self.other, planned, self.throughput_rps(candidates))


def answered_rows(own: Candidate, other: Candidate, share: float) -> Mapping[AnsweredBy, float]:
    """Shares of the rows by the point that answers them."""
    return mixed_rows(other.rows, own.rows, share) if share < 1.0 else own.rows
