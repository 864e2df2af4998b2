"""Who writes shares a machine with its router, its door and maybe its callers: a budget says nothing of those.

A replica that writes is busy whenever it has one chat, however few the chats are. Where more replicas than free cores
are busy they stop each other, and the router and the door too: on two cores two replicas carried no more than one did,
or less, of chats without images (docs/measurements.md). So a plan within the cores that are left is preferred, and
beyond them replicas must be able to carry more than comes, by as much as they share.
"""

from dataclasses import dataclass, replace

from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_adapter.planning.relaxation import relax, solve_or_relax
from trimtab_pipelines.shared_machine import Machine

OVERSUBSCRIPTION_COST = 1.3
"""How much less replicas carry that take turns on cores, beside what each is given of them: their batches are smaller,
and whoever wakes waits for a turn."""
MAX_EXTRAPOLATION = 2.0
"""Others use more with more requests, but not all that they use is for requests: of less than this share of the load
that is planned for, nothing more is concluded."""


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """What others were seen to use of a machine, while so many requests a second came."""

    machine: Machine
    load_rps: float

    def at(self, load_rps: float) -> Machine:
        """What is to be expected at another load: less than was seen is not counted on."""
        times = load_rps / self.load_rps if self.load_rps > 0 else MAX_EXTRAPOLATION
        others = self.machine.other_cores * min(max(times, 1.0), MAX_EXTRAPOLATION)
        return self.machine.model_copy(update={"other_cores": others})


def within_machine(problem: PlanningProblem, seen: MachineLoad | None) -> PlanningProblem:
    """The question, eased, for as many cores of its budget as are of use on the machine that it is for.

    Without a machine, where nodes have room for what is asked of them, that is all of the budget. Only for pipelines
    that write: of other replicas the measured service times tell what sharing costs. Sizes that are pinned are the
    user's choice.
    """
    stages, budget = problem.spec.stages, problem.spec.budget.cores
    pinned = any(stage.pin.replicas is not None for stage in stages)
    if seen is None or pinned or not any(stage.generates for stage in stages):
        return relax(problem)
    machine = seen.at(problem.load_rps)
    if budget <= machine.available_cores:
        return relax(problem)
    sizes = sorted({machine.available_cores, min(budget, machine.cores), budget})
    return max((relax(_within(problem, cores, machine.available_cores)) for cores in sizes), key=_kept)


def _within(problem: PlanningProblem, cores: float, available_cores: float) -> PlanningProblem:
    """The question with so many cores to plan with; where fewer are left replicas share them, and carry less."""
    oversubscription = OVERSUBSCRIPTION_COST * cores / available_cores if cores > available_cores else 1.0
    budget = problem.spec.budget.model_copy(update={"cores": cores})
    whose = "budget.cores" if cores == problem.spec.budget.cores else "cores that others leave on this machine"
    spec = problem.spec.model_copy(update={"budget": budget})
    return replace(problem, spec=spec, oversubscription=oversubscription, cores_constraint=whose)


def _kept(problem: PlanningProblem) -> tuple[bool, bool, float]:
    """What a plan keeps, the most important first; of plans that keep as much the first is taken, with fewest cores."""
    try:
        found = solve_or_relax(problem)
    except PlanningError:  # not even the smallest replicas fit
        return False, False, -1.0
    _, promised_seconds = problem.latency_target
    in_time = found.program.latency_seconds(found.solution.choice) <= promised_seconds + 1e-9
    return found.feasible, in_time, found.fraction
