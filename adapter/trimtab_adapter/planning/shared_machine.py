"""Shared machine: on one machine, generation replicas compete with the router, Envoy and the load generator for cores.

The budget does not count those. A generation replica is busy whenever it has one chat. More busy replicas than free
cores slow each other and the router. A plan within the remaining cores is therefore preferred, and beyond them replicas
must be able to carry more than the load, in proportion to the sharing.
"""

from dataclasses import dataclass, replace

from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_adapter.planning.relaxation import relax, solve_or_relax
from trimtab_pipelines.shared_capacity import Machine

OVERSUBSCRIPTION_COST = 1.3
"""Throughput loss of replicas that share cores, besides the cores they lack:

their batches are smaller and each wake-up waits.
"""
MAX_EXTRAPOLATION = 2.0
"""Other processes use more cores with more requests, but not in proportion:

their usage is scaled by at most this factor.
"""


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """Cores that other processes used while this many requests per second arrived."""

    machine: Machine
    load_rps: float

    def at(self, load_rps: float) -> Machine:
        """The expected usage at another load; never less than observed."""
        factor = load_rps / self.load_rps if self.load_rps > 0 else MAX_EXTRAPOLATION
        others = self.machine.other_cores * min(max(factor, 1.0), MAX_EXTRAPOLATION)
        return self.machine.model_copy(update={"other_cores": others})


def within_machine(problem: PlanningProblem, load: MachineLoad | None) -> PlanningProblem:
    """The relaxed problem, limited to the cores of its budget that are usable on this machine.

    Without a shared machine that is the whole budget. It applies to pipelines with a generation stage only: for other
    replicas the measured service times show the cost of sharing. Pinned sizes are the user's choice.
    """
    stages, budget = problem.spec.stages, problem.spec.budget.cores
    pinned = any(stage.pin.replicas is not None for stage in stages)
    if load is None or pinned or not any(stage.generates for stage in stages):
        return relax(problem)
    machine = load.at(problem.load_rps)
    if budget <= machine.available_cores:
        return relax(problem)
    sizes = sorted({machine.available_cores, min(budget, machine.cores), budget})
    return max((relax(_within(problem, cores, machine.available_cores)) for cores in sizes), key=_satisfied_constraints)


def _within(problem: PlanningProblem, cores: float, available_cores: float) -> PlanningProblem:
    """The problem with these cores; if fewer are left, replicas share them and carry less."""
    oversubscription = OVERSUBSCRIPTION_COST * cores / available_cores if cores > available_cores else 1.0
    budget = problem.spec.budget.model_copy(update={"cores": cores})
    constraint = (
        "budget.cores" if cores == problem.spec.budget.cores else "cores left by other processes on this machine"
    )
    spec = problem.spec.model_copy(update={"budget": budget})
    return replace(problem, spec=spec, oversubscription=oversubscription, cores_constraint=constraint)


def _satisfied_constraints(problem: PlanningProblem) -> tuple[bool, bool, float]:
    """The constraints a plan satisfies, most important first; `max` then picks the plan with the fewest cores."""
    try:
        found = solve_or_relax(problem)
    except PlanningError:  # the smallest replicas do not fit
        return False, False, -1.0
    _, target_seconds = problem.latency_target
    in_time = found.program.latency_seconds(found.solution.choice) <= target_seconds + 1e-9
    return found.feasible, in_time, found.fraction
