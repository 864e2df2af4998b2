"""Alerts on client errors, evaluated by Prometheus' rule tester."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.charts.helm import CHART

BASE = 'namespace="a",pipeline="p"'


def series(ok: int, refused: int, callers: int | None) -> list[dict[str, str]]:
    """Eight hours, so many requests a minute."""
    rates = {f'trimtab_requests_total{{{BASE},outcome="ok"}}': ok}
    rates[f'trimtab_requests_total{{{BASE},outcome="refused"}}'] = refused
    if callers is not None:
        rates[f"trimtab_client_errors_total{{{BASE}}}"] = callers
    return [{"series": name, "values": f"0+{rate}x480"} for name, rate in rates.items()]


@pytest.mark.parametrize(
    ("ok", "refused", "callers", "pages"),
    [
        (100, 100, 100, False),  # half of all is one broken client
        (100, 100, 0, True),
        (100, 100, None, True),  # routers of before, which do not tell them apart
        (0, 100, 100, False),
        (100, 1000, 900, True),  # behind a broken client, others suffer too
    ],
)
def test_client_errors_do_not_page(tmp_path: Path, ok, refused, callers, pages):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool")
    shutil.copy(CHART / "alerts.yaml", tmp_path)
    expression = 'count(ALERTS{alertname="TrimtabErrorBudgetBurnFast",alertstate="firing"}) or vector(0)'
    test = {
        "interval": "1m",
        "input_series": series(ok, refused, callers),
        "promql_expr_test": [
            {"expr": expression, "eval_time": "7h", "exp_samples": [{"labels": "{}", "value": int(pages)}]}
        ],
    }
    (tmp_path / "test.yaml").write_text(json.dumps({"rule_files": ["alerts.yaml"], "tests": [test]}))
    done = subprocess.run(
        [promtool, "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
