"""The one-server model by which a price of time is judged."""

import numpy as np
import pytest

from benchmarks.schedule import holding_back
from benchmarks.schedule.holding_back import ACCURACY, DROP, IDLE, SLOTS, Server


def test_nothing_is_worth_more_than_the_best_policy_and_calm_times_are_answered_at_their_best(monkeypatch):
    monkeypatch.setattr(holding_back, "DEADLINE", 6)
    server = Server(0.1)
    always_fast = np.where(server.masks == 0, IDLE, 0)
    chosen = np.tile(always_fast, (2, 1))
    best, fast = server.value(ACCURACY), server.value(ACCURACY, chosen)

    assert best > fast
    assert fast == pytest.approx(0.1 / SLOTS[-1] * ACCURACY[0], rel=0.05)
    assert best <= 0.1 / SLOTS[-1] * ACCURACY[-1]


def test_who_drops_everybody_gets_nothing(monkeypatch):
    monkeypatch.setattr(holding_back, "DEADLINE", 6)
    server = Server(0.5)
    chosen = np.tile(np.where(server.masks == 0, IDLE, DROP), (2, 1))

    assert server.value(ACCURACY, chosen) == pytest.approx(0.0)
