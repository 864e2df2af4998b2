"""`OutlierDetector`: ejects replicas of one stage that fail or are slow while its other replicas are not.

A failed batch counts against its replica only once another replica has served the same rows, so that a bad request
ejects no replica. A stage whose rows may not run twice has no such evidence: there every failure counts. An ejected
replica gets one batch as a probe after a pause, and returns if it serves it; otherwise the pause doubles. A replica
that reports that its event loop lags is ejected as well.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import median

from trimtab_router.scheduling.interfaces import Clock, Feature, StatsSink
from trimtab_router.scheduling.replica_slots import Batch, BatchFailed, BatchOutcome, Completed, ReplicaSlots

CONSECUTIVE_FAULTS = 2
RECENT_BATCHES, MIN_RECENT_FAULTS = 20, 4
FAULT_SHARE_FACTOR = 3.0
"""Ratio of a replica's share of faults to that of all other replicas from which it is ejected."""
SLOW_FACTOR = 2.5
"""Ratio of a replica's slowness to the median of the other replicas from which it is ejected."""
MIN_EXCESS_SECONDS = 0.02
"""Mean delay of a batch beyond its prediction below which a replica is not slow: such delays are noise."""
SLOWNESS_WEIGHT, MIN_OBSERVATIONS = 0.3, 4
MIN_CHATS = 8
"""Of a generation stage. Times to first token vary much: the median of so many counts."""
BASE_EJECTION_SECONDS, MAX_EJECTION_SECONDS = 1.0, 8.0
MAX_EJECTED_SHARE = 0.5


@dataclass(slots=True)
class ReplicaRecord:
    """Recent batches of one replica."""

    consecutive_faults: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT_BATCHES))
    """Whether each batch was a fault of the replica."""
    slowness: float = 1.0
    """Recent ratio of observed to predicted service time."""
    excess_seconds: float = 0.0
    observations: int = 0
    chats: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MIN_CHATS))
    """Slowness and excess of recent chats."""
    ejections: int = 0
    """Ejections since it last served `RECENT_BATCHES` without a fault."""
    probed_from: float = inf
    """While it is ejected: when it may take its probe. Batches dispatched before say nothing about it."""

    def note(self, *, fault: bool) -> None:
        self.recent.append(fault)
        self.consecutive_faults = self.consecutive_faults + 1 if fault else 0
        if len(self.recent) == RECENT_BATCHES and not any(self.recent):
            self.ejections = 0

    def observe(self, seconds: float, predicted_seconds: float, *, clips: bool) -> None:
        """Learn from a batch; `clips`: a single slow one, which its rows may have caused, does not suffice."""
        weight = max(SLOWNESS_WEIGHT, 1 / (self.observations + 1))
        self.observations += 1
        ratio = seconds / predicted_seconds
        self.slowness += weight * ((min(ratio, SLOW_FACTOR * self.slowness) if clips else ratio) - self.slowness)
        self.excess_seconds += weight * (seconds - predicted_seconds - self.excess_seconds)

    def observe_chat(self, seconds: float, predicted_seconds: float) -> None:
        self.observations += 1
        self.chats.append((seconds / predicted_seconds, seconds - predicted_seconds))
        self.slowness, self.excess_seconds = map(median, zip(*self.chats, strict=True))

    def reset(self) -> None:
        self.consecutive_faults, self.slowness, self.excess_seconds, self.observations = 0, 1.0, 0.0, 0
        self.recent.clear()
        self.chats.clear()


class OutlierDetector(Feature):
    """Ejects outliers among the replicas of a stage; at most half of the ready ones at a time.

    `wake` is called when a replica may take batches again; `retryable`: whether the rows of a failed batch run again.
    """

    def __init__(self, clock: Clock, stats: StatsSink, wake: Callable[[], None], *, retryable: bool) -> None:
        self._clock = clock
        self._stats = stats
        self._wake = wake
        self._retryable = retryable
        self._records: dict[ReplicaSlots, ReplicaRecord] = {}

    @property
    def ejected(self) -> list[ReplicaSlots]:
        return [replica for replica in self._records if replica.ejection]

    def set_replicas(self, replicas: Sequence[ReplicaSlots]) -> None:
        """Set the replicas of the stage. Call it after each change of their readiness, too."""
        for replica in self.ejected:
            if not replica.ready_variants:
                self._readmit(replica)
        for replica in self._records:
            if replica not in replicas:
                self._stats.forget_replica(replica.name)
        for replica in replicas:
            if replica not in self._records:
                self._stats.add_replica(replica.name)
        self._records = {replica: self._records.get(replica) or ReplicaRecord() for replica in replicas}
        for replica in self.ejected[self._max_ejected() :]:
            self._readmit(replica)
        for replica in replicas:
            if replica.overload and not replica.ejection:
                self._eject(replica, replica.overload)

    def candidates(self, failed_on: str) -> list[ReplicaSlots]:
        """Return the ready replicas for rows that failed on a replica: the other ones, if there are any."""
        usable = [replica for replica in self._records if replica.ready_variants and not replica.ejection]
        return [replica for replica in usable if replica.name != failed_on] or list(self._records)

    def on_batch_end(self, batch: Batch, outcome: BatchOutcome, now: float) -> None:
        record = self._records.get(batch.replica)
        if len(self._records) < 2:
            return
        if isinstance(outcome, Completed):
            for row_slice in batch.row_slices:
                if row_slice.failed_on not in {"", batch.replica.name}:
                    self._record_fault(row_slice.failed_on)
            if record is not None:
                record.note(fault=False)
                if not batch.replica.capacity:  # a generation has no predicted length
                    seconds = now - max(batch.dispatched_at, batch.replica.completed_at)
                    self._judge_seconds(batch, record, seconds, batch.point.seconds(batch.rows))
        elif isinstance(outcome, BatchFailed) and outcome.retryable and record is not None:
            if batch.replica.ejection and batch.dispatched_at >= record.probed_from:
                self._eject(batch.replica, batch.replica.ejection)
            elif not self._retryable:
                self._record_fault(batch.replica.name)

    def on_first_token(self, batch: Batch, seconds: float, predicted_seconds: float) -> None:
        """Judge a replica of a generation stage by the time to the first token of a chat."""
        record = self._records.get(batch.replica)
        if record is not None and len(self._records) > 1:
            self._judge_seconds(batch, record, seconds, predicted_seconds)

    def _record_fault(self, name: str) -> None:
        replica = next((replica for replica in self._records if replica.name == name), None)
        if replica is None or replica.ejection:
            return
        record = self._records[replica]
        record.note(fault=True)
        faults, others = sum(record.recent), [other for other in self._records.values() if other is not record]
        other_batches = sum(len(other.recent) for other in others)
        other_share = sum(sum(other.recent) for other in others) / max(other_batches, 1)
        if record.consecutive_faults >= CONSECUTIVE_FAULTS:
            self._eject(replica, f"{record.consecutive_faults} consecutive batches failed")
        elif faults >= MIN_RECENT_FAULTS and faults / len(record.recent) > FAULT_SHARE_FACTOR * other_share:
            self._eject(replica, f"{faults} of its last {len(record.recent)} batches failed")

    def _judge_seconds(self, batch: Batch, record: ReplicaRecord, seconds: float, predicted_seconds: float) -> None:
        """Eject a replica that is slower than its peers, and readmit an ejected one that served its probe in time."""
        replica = batch.replica
        if replica.ejection and batch.dispatched_at < record.probed_from:
            return
        if predicted_seconds > 0 and replica.capacity:
            record.observe_chat(seconds, predicted_seconds)
        elif predicted_seconds > 0:
            record.observe(seconds, predicted_seconds, clips=not replica.ejection)
        ratio = self._ratio_to_peers(record) if record.excess_seconds > MIN_EXCESS_SECONDS else 1.0
        if replica.ejection and ratio > SLOW_FACTOR:
            self._eject(replica, replica.ejection)
        elif replica.ejection:
            self._readmit(replica)
        elif ratio > SLOW_FACTOR and record.observations >= (MIN_CHATS if replica.capacity else MIN_OBSERVATIONS):
            what = "first tokens" if replica.capacity else "batches"
            self._eject(replica, f"its {what} take {ratio:.1f} times as long as its peers'")

    def _ratio_to_peers(self, record: ReplicaRecord) -> float:
        """Slowness of a replica over the median of the other ones; 1 if none of these has served a batch."""
        peers = [other.slowness for other in self._records.values() if other is not record and other.observations]
        return record.slowness / median(peers) if peers else 1.0

    def _max_ejected(self) -> int:
        return int(MAX_EJECTED_SHARE * sum(bool(replica.ready_variants) for replica in self._records))

    def _eject(self, replica: ReplicaSlots, reason: str) -> None:
        if not replica.ejection:
            if len(self.ejected) >= self._max_ejected():
                return
            self._stats.record_ejection(replica.name, reason)
        record = self._records[replica]
        pause_seconds = min(BASE_EJECTION_SECONDS * 2**record.ejections, MAX_EJECTION_SECONDS)
        record.ejections += 1
        record.reset()
        record.probed_from = inf
        replica.set_ejection(reason)
        self._clock.call_at(self._clock.now + pause_seconds, partial(self._probe, replica))

    def _probe(self, replica: ReplicaSlots) -> None:
        if replica.ejection and replica.overload:
            self._eject(replica, replica.overload)
        elif replica.ejection:
            self._records[replica].probed_from = self._clock.now
            replica.set_ejection(replica.ejection, probing=True)
            self._wake()

    def _readmit(self, replica: ReplicaSlots) -> None:
        replica.set_ejection("")
        self._records[replica].reset()
        self._stats.record_ejection_end(replica.name)
        self._wake()
