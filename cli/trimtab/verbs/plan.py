"""`trimtab plan`: what would run at a given load, and what if it were another; starts nothing."""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from trimtab.decisions import ALTERNATIVE_COLUMNS, STAGE_COLUMNS, Decision, alternative_rows, stage_rows, terminal_table
from trimtab.decisions import words as words_of
from trimtab.options import PipelineArgument, ProfilesOption, WhatIfOption, console
from trimtab.preparation import choose_profiles
from trimtab_adapter.baselines import static_plan
from trimtab_adapter.decide import Situation, plan_of, question_of
from trimtab_adapter.least_bad import answer
from trimtab_adapter.what_if import WhatIfError, alternatives
from trimtab_pipelines.documents import load_pipeline, load_profiles, write_json
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline


def command(  # noqa: PLR0913, PLR0917 (one for each option)
    pipeline: PipelineArgument,
    load: Annotated[float, typer.Option("--load", min=0.0, help="Requests per second to plan for")],
    profiles: ProfilesOption = None,
    baseline: Annotated[
        Literal["lightest", "heaviest"] | None, typer.Option(help="Plan these variants and never change them")
    ] = None,
    what_if: WhatIfOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan as JSON, for `up --plan`")] = None,
) -> int:
    """Show what would run at a load, and why, without running it."""
    if what_if and baseline:
        raise WhatIfError("--what-if asks what would be best; a --baseline never changes. Give one of them")
    document = load_pipeline(pipeline)
    found = load_profiles(choose_profiles(pipeline, document, profiles, console))
    decision = None if baseline else decision_at(document, found, load, what_if or [])
    plan = decision.plan if decision else static_plan(document, found, baseline or "lightest", load, time.time())
    console.print(terminal_table(STAGE_COLUMNS, stage_rows(plan)))
    for line in words_of(plan):
        console.print(line)
    if decision and decision.alternatives:
        console.print()
        console.print(terminal_table(ALTERNATIVE_COLUMNS, alternative_rows(decision), "what if"))
    if out is not None:
        write_json(out, plan)
        console.print(f"written to {out}")
    return 0


def decision_at(
    document: InferencePipeline,
    profiles: dict[str, ModelProfile],
    load_rps: float,
    what_if: list[str],
    current: PipelinePlan | None = None,
) -> Decision:
    """Decide for a load, and for every alternative asked for."""
    now = time.time()
    forecast = ForecastRecord(peak_rps=load_rps, source="given", reason="--load")
    question, forecast = question_of(document, profiles, Situation(forecast, now, current))
    tried = [alternative for asked in what_if for alternative in alternatives(question, asked)]
    found = answer(question)
    return Decision(plan_of(document, question, found, forecast, now), question, found, tried)
