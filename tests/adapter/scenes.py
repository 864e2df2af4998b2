"""A small pipeline with a real trade-off, its profiles, and a stateful fake of the router's own addresses."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.builders import a_chain, a_pipeline, a_point_profile, a_profile, a_variant
from trimtab_adapter.planning.decide import PlanningInputs, build_plan, decide, planning_problem
from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_adapter.planning.pool_allocation import PlanRequest, PoolDemand, split_pool
from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_pipelines.plan import Expectation, ForecastRecord, PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline, Pool

VARIANTS = ("light", "middle", "heavy")
ACCURACIES = {"light": 0.8, "middle": 0.9, "heavy": 0.97}


def a_ladder(stages: int = 2, variant: dict[str, Any] | None = None, **changes: Any) -> InferencePipeline:
    """A chain whose stages each have a light, a middle and a heavy variant."""
    chain = a_chain(stages)
    for stage in chain:
        stage["variants"] = [a_variant(name, accuracy=ACCURACIES[name], **(variant or {})) for name in VARIANTS]
    return a_pipeline(chain, **({"budget": {"cores": "4"}, "slo": {"latency": "400ms"}} | changes))


def with_stage(pipeline: InferencePipeline, index: int, **fields: Any) -> InferencePipeline:
    """The pipeline with other fields of one stage, validated anew."""
    stages = [stage.model_dump(by_alias=True) for stage in pipeline.spec.stages]
    stages[index] |= fields
    spec = pipeline.spec.model_validate(pipeline.spec.model_dump(by_alias=True) | {"stages": stages})
    return pipeline.replace(spec=spec)


def solve_together(
    pool: Pool, problems: Mapping[str, PlanningProblem], name: str = "shared"
) -> dict[str, PlanSolution]:
    solutions = split_pool(name, pool, {key: PoolDemand(problem) for key, problem in problems.items()})
    if solutions is None:
        raise PlanningError("the smallest plans do not fit together")
    return solutions


def plan_together(name: str, pool: Pool, members: Mapping[str, PlanRequest]) -> dict[str, PipelinePlan]:
    """The next plan of every pipeline of a pool, as `decide` does for one alone."""
    asked = {
        key: planning_problem(member.pipeline, member.profiles, member.planning_inputs)
        for key, member in members.items()
    }
    solutions = solve_together(pool, {key: problem for key, (problem, _) in asked.items()}, name)
    plans = {}
    for key, member in members.items():
        problem, forecast = asked[key]
        plans[key] = build_plan(member.pipeline, problem, solutions[key], forecast, member.planning_inputs.now_seconds)
    return plans


def profiles_of(pipeline: InferencePipeline) -> dict[str, ModelProfile]:
    """Profiles in which each step up the ladder costs several times as much."""
    seconds = {"light": (0.001, 0.001), "middle": (0.003, 0.005), "heavy": (0.010, 0.020)}
    points = [a_point_profile(name, *seconds[name]) for name in VARIANTS]
    return {stage.name: a_profile(stage.name, points) for stage in pipeline.spec.stages}


def plan_for(
    pipeline: InferencePipeline,
    peak_rps: float,
    current: PipelinePlan | None = None,
    now_seconds: float = 1000.0,
    recent_rps: Sequence[tuple[float, float]] = (),
    **measured: Any,
) -> PipelinePlan:
    forecast = ForecastRecord(peak_rps=peak_rps, source="reactive")
    inputs = PlanningInputs(forecast, now_seconds, current, tuple(recent_rps), **measured)
    return decide(pipeline, profiles_of(pipeline), inputs)


def expected(plan: PipelinePlan) -> Expectation:
    assert plan.spec.expected is not None
    return plan.spec.expected


class FakeRouter:
    """Serves `/trimtab/v1/arrivals` and `/trimtab/v1/state` from its attributes; arrivals of the requested time."""

    def __init__(self) -> None:
        self.load: Any = {}
        self.state: Any = {"plan_generation": 1, "stages": {}}
        self.status = 200
        self.asked = asyncio.Semaphore(0)  # one permit for each time the load was asked for
        self.url = ""
        self.offer(5.0)

    def offer(self, rps: float) -> None:
        """Report this load for ten minutes."""
        self.load = {"now": 1000.0, "rps": [rps] * 600}

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("arrivals"):
            self.asked.release()
        if self.status != 200:
            return web.Response(status=self.status, text="the router is not well")
        content = self._load(request) if request.path.endswith("arrivals") else self.state
        if isinstance(content, str):
            return web.Response(text=content, content_type="application/json")
        return web.json_response(content)

    def _load(self, request: web.Request) -> Any:
        if not isinstance(self.load, dict) or not isinstance(self.load.get("rps"), list):
            return self.load
        return self.load | {"rps": self.load["rps"][-int(request.query.get("seconds", "600")) :]}

    @asynccontextmanager
    async def serve(self, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator["FakeRouter"]:
        app = web.Application()
        app.router.add_get("/trimtab/v1/arrivals", self._answer)
        app.router.add_get("/trimtab/v1/state", self._answer)
        async with TestServer(app, host=host, port=port) as server:
            self.url = f"http://127.0.0.1:{server.port}"
            yield self
