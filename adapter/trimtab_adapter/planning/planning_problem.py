"""What a plan is wanted for: a pipeline, what was measured of it and of the world, and a load."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab_adapter.planning.latency import sustained_load_rps
from trimtab_pipelines.errors import OperationFailed
from trimtab_pipelines.graph import predecessors
from trimtab_pipelines.plan import PipelinePlan, StagePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Stage


class PlanningError(OperationFailed):
    """The pipeline and its profiles do not fit together; the message names the stage and what is missing."""


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """What a plan is wanted for: a load in requests per second, and what was measured of the world."""

    spec: InferencePipelineSpec
    profiles: Mapping[str, ModelProfile]
    load_rps: float
    rows_per_request: Mapping[str, float] = field(default_factory=dict)
    """Measured; else as the spec expects."""
    service_ratios: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By stage and variant."""
    current: PipelinePlan | None = None
    slowdown: float = 1.0
    """Over profiled times of who writes."""
    drifted_accuracies: tuple[str, ...] = ()
    """Which accuracies of the spec are observed ones, in words."""
    prompt_tokens: Mapping[str, float] = field(default_factory=dict)
    """Measured; else as profiled."""
    oversubscription: float = 1.0
    """How many times the load replicas must be able to carry that share a machine's cores."""
    cores_constraint: str = "budget.cores"
    """Whose cores the spec's budget has."""

    @property
    def busiest_rps(self) -> float:
        """The requests of the busiest second, headroom included, and what sharing cores costs."""
        return self.load_rps * (1.0 + self.spec.adaptation.headroom) * self.oversubscription

    def stage_rps(self, stage: str) -> float:
        """The rows per second a stage must carry, headroom included."""
        return self.busiest_rps * self.rows(stage)

    def sustained_stage_rps(self, stage: str) -> float:
        """The rows per second that keep coming where the busiest second brings `stage_rps`."""
        return sustained_load_rps(self.busiest_rps, self.spec.adaptation.horizon_seconds) * self.rows(stage)

    def rows(self, stage: str) -> float:
        """The rows a request brings to a stage, as measured or else as expected."""
        known = self.rows_per_request.get(stage)
        if known is None or (not known and not self.spec.stage(stage).encodes):  # chats may well show nothing
            return self.spec.expected_rows[stage]
        return known

    def images(self, stage: str) -> float:
        """The images a chat shows, for who writes; 1, as was measured, where the pipeline does not tell."""
        encoder = next(
            (reads for reads in predecessors(self.spec.stage(stage)) if self.spec.stage(reads).encodes), None
        )
        return 1.0 if encoder is None else self.rows(encoder)

    def prompt_load_note(self, stage: Stage) -> str:
        """Say in a few words which prompts a stage that writes is planned for; nothing where nobody measured them."""
        tokens = self.prompt_tokens.get(stage.name, 0.0)
        if not stage.generates or not tokens:
            return ""
        come = tokens * self.stage_rps(stage.name) / self.oversubscription
        return f"{stage.name}: prompts of {tokens:.3g} tokens, {come:.3g} a second"

    @property
    def shared_machine_note(self) -> str:
        """Say in a few words what is heeded of others on the machine; nothing where they leave the whole budget."""
        if self.oversubscription > 1.0:
            return f"for {self.oversubscription:.3g} times as much, since replicas share the cores that others leave"
        if self.cores_constraint == "budget.cores":
            return ""
        return f"on {self.spec.budget.cores:.3g} {self.cores_constraint}"

    @property
    def latency_target(self) -> tuple[str, float]:
        """What is planned for, and its seconds: of who writes the first piece, where it was measured."""
        slo, writers = self.spec.slo, [stage for stage in self.spec.stages if stage.generates]
        if slo.time_to_first_token_seconds is None or not all(self._has_first_token_times(stage) for stage in writers):
            return "slo.latency", slo.latency_seconds
        return "slo.timeToFirstToken", slo.time_to_first_token_seconds

    def _has_first_token_times(self, stage: Stage) -> bool:
        profile = self.profiles.get(stage.name)
        return profile is not None and all(point.chats is not None for point in profile.spec.points)

    def running(self, stage: str) -> StagePlan | None:
        """What runs in a stage now, if anything."""
        plans = () if self.current is None else self.current.spec.stages
        return next((plan for plan in plans if plan.name == stage), None)
