"""`PlanningProblem`: everything a plan is computed from: a pipeline, its profiles, measurements and a load."""

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


@dataclass(frozen=True, slots=True, eq=False)
class PlanningProblem:
    """A pipeline, its profiles, measurements and the load to plan for, in requests per second.

    Problems are equal only if they are the same object, by which a decision's solutions are cached.
    """

    spec: InferencePipelineSpec
    profiles: Mapping[str, ModelProfile]
    load_rps: float
    rows_per_request: Mapping[str, float] = field(default_factory=dict)
    """Measured rows per request by stage; the pipeline's expected rows for the others."""
    service_ratios: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Observed over profiled service time, by stage and variant."""
    current: PipelinePlan | None = None
    slowdown: float = 1.0
    """Factor on the profiled times of generation stages."""
    drifted_accuracies: tuple[str, ...] = ()
    """Accuracies that were replaced by observed ones, as phrases for the explanation."""
    prompt_tokens: Mapping[str, float] = field(default_factory=dict)
    """Measured prompt tokens by generation stage; the profiled number for the others."""

    @property
    def busiest_rps(self) -> float:
        """Requests in the busiest second, headroom included."""
        return self.load_rps * (1.0 + self.spec.adaptation.headroom)

    def stage_rps(self, stage: str) -> float:
        """Rows per second a stage must carry in the busiest second, headroom included."""
        return self.busiest_rps * self.rows(stage)

    def sustained_stage_rps(self, stage: str) -> float:
        """Rows per second that a stage receives on average if the busiest second brings `stage_rps`."""
        return sustained_load_rps(self.busiest_rps, self.spec.adaptation.horizon_seconds) * self.rows(stage)

    def rows(self, stage: str) -> float:
        """Rows per request at a stage, measured or else expected."""
        measured = self.rows_per_request.get(stage)
        if measured is None or (not measured and not self.spec.stage(stage).encodes):  # a chat may have no image
            return self.spec.expected_rows[stage]
        return measured

    def images(self, stage: str) -> float:
        """Images per chat for a generation stage; 1 if the pipeline has no encoder, as in the profile."""
        encoder = next((name for name in predecessors(self.spec.stage(stage)) if self.spec.stage(name).encodes), None)
        return 1.0 if encoder is None else self.rows(encoder)

    def prompt_load_note(self, stage: Stage) -> str:
        """Describe the prompts a generation stage is planned for; empty if they were not measured."""
        tokens = self.prompt_tokens.get(stage.name, 0.0)
        if not stage.generates or not tokens:
            return ""
        tokens_per_second = tokens * self.stage_rps(stage.name)
        return f"{stage.name}: prompts of {tokens:.3g} tokens, {tokens_per_second:.3g} tokens/s"

    @property
    def latency_target(self) -> tuple[str, float]:
        """Name and seconds of the latency SLO: time to first token if set and profiled, else the latency."""
        slo, generation_stages = self.spec.slo, [stage for stage in self.spec.stages if stage.generates]
        if slo.time_to_first_token_seconds is None or not all(
            self._has_first_token_times(stage) for stage in generation_stages
        ):
            return "slo.latency", slo.latency_seconds
        return "slo.timeToFirstToken", slo.time_to_first_token_seconds

    def _has_first_token_times(self, stage: Stage) -> bool:
        profile = self.profiles.get(stage.name)
        return profile is not None and all(point.chats is not None for point in profile.spec.points)

    def running(self, stage: str) -> StagePlan | None:
        plans = () if self.current is None else self.current.spec.stages
        return next((plan for plan in plans if plan.name == stage), None)
