"""The most urgent first, at the plan's own operating point. Pure.

Work-conserving: up to the planned rows leave, most urgent first, but no more than the most urgent of them can afford.
Only when the backlog is more than the replicas can serve in time is an urgent slice that would shrink the batch dropped
instead: else each batch would shrink to save one request and many others would be late for it.
"""

from trimtab_router.stage.policies.view import Departure, Front, NotBefore, Policy, View, overloaded


def decide(view: View) -> Departure | NotBefore:
    """Let the next batch leave."""
    front, point = Front(view), view.points[0]
    for head in view.waiting:
        company = front.company(head, point)
        full = min(view.most_rows, company.rows)
        fitting = view.fitting_rows(point, head, full)
        if view.drop_policy == "Predicted" and 0 < fitting < full and overloaded(view, company, point):
            front.drop(head)
            continue
        return Departure(point, company.first(fitting or full), front.drops)
    return NotBefore(drops=front.drops)


POLICY = Policy(decide)
