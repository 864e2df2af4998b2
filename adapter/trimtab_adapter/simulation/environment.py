"""What a simulation takes from the world beside pipeline, profiles and arrivals: parameters that can be measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab_adapter.simulation.machine_speed import MachineSpeed


@dataclass(frozen=True, slots=True)
class Failure:
    """A replica of a stage that dies; its batches go back into the queue and another is started."""

    at_seconds: float
    stage: str


@dataclass(frozen=True, slots=True)
class Environment:
    """How the machines behave."""

    startup_seconds: float = 8.0
    """From the decision to start a replica until it is ready (IPA reports about 8 s)."""
    reaction_seconds: float = 0.2
    """From a tick of the slow loop until its plan is in force at the router."""
    before_seconds: float = 0.0
    """From the arrival of a request until its rows are queued."""
    after_seconds: float = 0.0
    """From the last batch's answer until the caller has it."""
    transfer_seconds: float = 0.0
    """Of each batch's profiled service time, what passes on the way there and back."""
    spread: float = 1.0
    """How far service times lie around the profile's median, as a multiple of what its p99 says; 0 for none."""
    factors: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    """By stage and variant, what batches took over what was expected of them, one as likely as the other; where they
    were measured they stand in place of what the profile's p99 says."""
    contention: float = 0.0
    """By what share of its time a batch is slower for each other replica that is busy when it begins, where replicas
    share a machine's cores, caches and memory."""
    speeds: tuple[MachineSpeed, ...] = ()
    """How fast each of the machine's processors is over time, where it was recorded; replicas take turns with them.
    Empty where all are equally fast at all times."""
    service_ratios: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Observed over profiled service time by stage and variant, where a machine is known to differ."""
    size_ratios: Mapping[tuple[str, str], Mapping[int, float]] = field(default_factory=dict)
    """The same by rows of a batch, on top of that, where sizes were measured; straight lines between."""
    fan_out: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    """By (stage, count output), the probabilities of 0, 1, 2 … rows for each input row; where there is none, the whole
    numbers around the `expectedRows` of the pipeline."""
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    """By operating point, where points are models of their own: how long a replica that ran another one before needs to
    load it."""
    failures: tuple[Failure, ...] = ()
    """Replicas that die."""
