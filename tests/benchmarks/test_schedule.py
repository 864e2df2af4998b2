"""The one-server model by which a price of time is judged."""

import numpy as np
import pytest

from benchmarks.schedule import holding_back
from benchmarks.schedule.holding_back import ACCURACY, DROP, IDLE, SLOTS, Server


def test_optimal_policy_is_best_and_serves_calm_times_well(monkeypatch):
    monkeypatch.setattr(holding_back, "DEADLINE", 6)
    server = Server(0.1)
    always_fast = np.where(server.masks == 0, IDLE, 0)
    chosen = np.tile(always_fast, (2, 1))
    best, fast = server.value(ACCURACY), server.value(ACCURACY, chosen)

    assert best > fast
    assert fast == pytest.approx(0.1 / SLOTS[-1] * ACCURACY[0], rel=0.05)
    assert best <= 0.1 / SLOTS[-1] * ACCURACY[-1]


def test_policy_that_drops_all_rows_gets_nothing(monkeypatch):
    monkeypatch.setattr(holding_back, "DEADLINE", 6)
    server = Server(0.5)
    chosen = np.tile(np.where(server.masks == 0, IDLE, DROP), (2, 1))

    assert server.value(ACCURACY, chosen) == pytest.approx(0.0)
