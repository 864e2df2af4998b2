"""All friendly requests of a run: this module is the last of its folder."""

import numpy as np
import pytest

from tests.figures import Figures
from tests.security.conftest import Server

CALM_SECONDS = 10.0
MAX_RATIO, MIN_P99_SECONDS = 2.0, 0.010
"""A calm p99 below ten milliseconds says more about the machine than about the router."""


@pytest.mark.security
def test_friendly_clients_were_served_throughout(server: Server, figures: Figures) -> None:
    lines = [line for line in server.friendly_lines() if line.kind != "health"]
    calm_until = lines[0].at + CALM_SECONDS
    calm = [line.seconds for line in lines if line.at < calm_until]
    hostile = [line.seconds for line in lines if line.at >= calm_until]
    calm_p99, p99 = (float(np.quantile(seconds, 0.99)) for seconds in (calm, hostile))
    figures.add(requests=len(lines), calm_p99_seconds=round(calm_p99, 4), p99_seconds=round(p99, 4))

    assert [line for line in lines if line.code != "ok"] == []
    ratio = p99 / max(calm_p99, MIN_P99_SECONDS)
    figures.require("p99 beside hostile clients over calm p99", round(ratio, 2), "<=", MAX_RATIO, depends_on_load=True)
