"""A price of time against the truth: one server, bursts, deadlines, solved exactly by value iteration.

Time goes in slots. In a slot at most one job comes, more often in a burst than in a calm; each has `DEADLINE` slots.
Who waits is told by one bit for each age. The server takes the oldest, by one of three options, or drops it. The state
is small enough for the best policy there is, and so for the exact value of any other: that of the router's schedule
with a price and without one.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.shadow_price import shadow_price
from trimtab_router.scheduling.policies.deadline_schedule import DROPPED, Job, load_factor, solve

DEADLINE = 12
SLOTS, ACCURACY = (2, 3, 6), (0.67, 0.76, 0.80)
DROP, IDLE = len(SLOTS), len(SLOTS) + 1
CHANGE = (0.05, 0.10)
"""Probability that a calm slot is followed by a burst, and the other way."""
BURST = 3.0
"""How many times as often jobs come in a burst."""
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Found:
    """Of a policy, in the long run: right answers a job, and the share of jobs without an answer."""

    value: float
    violations: float


def chances(load: float) -> tuple[float, float]:
    """Probability of an arrival in a slot, calm and burst; the mean gives the best option so much work."""
    calm_share = CHANGE[1] / sum(CHANGE)
    mean = load / SLOTS[-1]
    calm = mean / (calm_share + BURST * (1 - calm_share))
    return calm, BURST * calm


class Server:
    """All states of the server under one load, and what follows from them.

    A state is (phase, mask of the ages that wait); what can no longer be served is not in the mask.
    """

    def __init__(self, load: float) -> None:
        bits = DEADLINE - SLOTS[0] + 1
        self.masks = np.arange(2**bits)
        self.arrival = np.array(chances(load))
        self.oldest = np.array([int(mask).bit_length() - 1 for mask in self.masks])
        self.without = np.where(self.masks > 0, self.masks - (1 << np.maximum(self.oldest, 0)), 0)
        self.slack = DEADLINE - self.oldest
        self.shifted = (self.masks << 1) & (2**bits - 1)
        self.phases = np.array([[1 - CHANGE[0], CHANGE[0]], [CHANGE[1], 1 - CHANGE[1]]])

    def later(self, values: Floats, slots: int) -> Floats:
        """The discounted values of so many slots later. Shape (phases, masks)."""
        for _ in range(slots):
            arrived, none = values[:, self.shifted | 1], values[:, self.shifted]
            chance = self.arrival[:, None]
            values = DISCOUNT * (self.phases @ (chance * arrived + (1 - chance) * none))
        return values

    def worth_of_actions(self, values: Floats, rewards: tuple[float, ...]) -> Floats:
        """What each option gives from each state on. Shape (options and to be idle, phases, masks)."""
        found = np.full((len(SLOTS) + 2, *values.shape), -np.inf)
        for option, slots in enumerate(SLOTS):
            ahead = self.later(values, slots)[:, self.without] + rewards[option]
            found[option] = np.where((self.oldest >= 0) & (slots <= self.slack), ahead, -np.inf)
        found[IDLE] = np.where(self.masks == 0, self.later(values, 1), -np.inf)
        return found

    def with_drops(self, found: Floats, chosen: Integers | None) -> Floats:
        """The values of states: by a policy, else the best; to drop the oldest leads to another state at once."""
        best: Floats = found.max(axis=0) if chosen is None else np.take_along_axis(found, chosen[None], axis=0)[0]
        for oldest in range(int(self.oldest.max()) + 1):
            states = self.masks[self.oldest == oldest]
            dropped = best[:, self.without[states]]
            if chosen is None:
                best[:, states] = np.maximum(best[:, states], dropped)
            else:
                best[:, states] = np.where(chosen[:, states] == DROP, dropped, best[:, states])
        return best

    def value(self, rewards: tuple[float, ...], chosen: Integers | None = None) -> float:
        """Rewards a slot, discounted from the empty server on: of a policy, else of the best."""
        values = np.zeros((2, self.masks.size))
        for _ in range(ROUNDS):
            before, values = values, self.with_drops(self.worth_of_actions(values, rewards), chosen)
            if np.abs(values - before).max() < 1e-6:
                break
        calm = CHANGE[1] / sum(CHANGE)
        return float((1 - DISCOUNT) * (calm * values[0, 0] + (1 - calm) * values[1, 0]))


DISCOUNT = 0.998
ROUNDS = 6000


@lru_cache(maxsize=64)
def scheduled(price: float) -> Integers:
    """What the schedule does in every state: an option for the oldest, or DROP. Shape (phases, masks)."""
    server = Server(1.0)
    return np.tile(np.array([_action(int(mask), price) for mask in server.masks]), (2, 1))


def _action(mask: int, price: float) -> int:
    ages = [age for age in range(mask.bit_length() - 1, -1, -1) if mask >> age & 1]
    if not ages:
        return IDLE
    seconds, values = np.array(SLOTS, dtype=float), np.array(ACCURACY)
    jobs = [Job(float(DEADLINE - age), seconds, values, value=1.0) for age in ages]
    now = price * load_factor(float(SLOTS[0] * len(ages)), float(DEADLINE))
    step = solve(jobs, 0.0, price=now).steps[0]
    return DROP if step.option == DROPPED else step.option


def outcome(load: float, price: float | None) -> Found:
    """What a price brings under a load; None: the best policy there is."""
    server = Server(load)
    jobs_a_slot = load / SLOTS[-1]
    if price is None:
        return Found(server.value(ACCURACY) / jobs_a_slot, 0.0)
    chosen = scheduled(price)
    served = server.value((1.0,) * len(SLOTS), chosen) / jobs_a_slot
    return Found(server.value(ACCURACY, chosen) / jobs_a_slot, 1.0 - served)


def price_of(load: float) -> float:
    """The slow loop's price of a slot for the load that it expects."""
    return shadow_price(list(zip(map(float, SLOTS), ACCURACY, strict=True)), load / SLOTS[-1], 1)
