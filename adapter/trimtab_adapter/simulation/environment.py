"""Environment of a simulation: measurable parameters of machines besides pipeline, profiles and arrivals."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab_adapter.simulation.machine_speed import MachineSpeed


@dataclass(frozen=True, slots=True)
class Failure:
    """A replica of a stage that dies; its batches return to the queue and another replica starts."""

    at_seconds: float
    stage: str


@dataclass(frozen=True, slots=True)
class Environment:
    """Parameters of the simulated machines."""

    startup_seconds: float = 8.0
    """From the start of a replica until it is ready (IPA reports about 8 s)."""
    reaction_seconds: float = 0.2
    """From a tick of the control loop until its plan is in force at the router."""
    before_seconds: float = 0.0
    """From the arrival of a request until its rows are queued."""
    after_seconds: float = 0.0
    """From the last batch's response until the client has it."""
    transfer_seconds: float = 0.0
    """Part of each batch's profiled service time that is spent on transport."""
    spread: float = 1.0
    """Spread of service times around the profile's median, as a multiple of what its p99 says; 0 for none."""
    factors: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    """By stage and variant:

    measured over expected batch times, equally likely; they replace the spread of the profile's p99.
    """
    contention: float = 0.0
    """Slowdown of a batch, as a share of its time, for each other replica that is busy when it begins."""
    speeds: tuple[MachineSpeed, ...] = ()
    """Recorded speed of each processor over time; replicas are assigned to them in turn.

    Empty if all are equally fast.
    """
    service_ratios: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Observed over profiled service time, by stage and variant."""
    size_ratios: Mapping[tuple[str, str], Mapping[int, float]] = field(default_factory=dict)
    """The same by rows of a batch, on top of that, interpolated linearly."""
    fan_out: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    """By (stage, count output):

    the probabilities of 0, 1, 2 … rows per input row; by default the integers around the pipeline's `expectedRows`.
    """
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    """By operating point, if points are models of their own:

    time a replica needs to load it after running another one.
    """
    failures: tuple[Failure, ...] = ()
    """Replicas that die."""
