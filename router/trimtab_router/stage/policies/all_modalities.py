"""The most urgent first, always at the most accurate point: what does not know of modalities (MOSEL's none). Pure.

A baseline, with all that batches of several requests can give it.
"""

from dataclasses import replace

from trimtab_router.stage.policies import urgent_first
from trimtab_router.stage.policies.view import Departure, NotBefore, Policy, View


def decide(view: View) -> Departure | NotBefore:
    """Let the next batch leave."""
    best = max(view.points, key=lambda point: point.accuracy)
    return urgent_first.decide(replace(view, points=(best,)))


POLICY = Policy(decide, falls_back=True)
