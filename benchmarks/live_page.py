"""Charts of a live page or report, read from its HTML."""

import base64
import json
import re
from typing import Any

import numpy as np

_CHARTS = re.compile(r"<script type=['\"]application/json['\"] id=['\"]charts['\"]>(.*?)</script>", re.DOTALL)
"""The page as served, or as a browser's DOM, which writes double quotes."""


def charts_of(html: str) -> dict[str, Any]:
    """Parse the charts of a page, by the id of their element. Raises ValueError for a number that is not JSON."""
    match = _CHARTS.search(html)
    if match is None:
        raise ValueError("the page has no charts element")

    def reject(constant: str) -> None:
        raise ValueError(constant)

    charts: dict[str, Any] = json.loads(match[1], parse_constant=reject)
    return charts


def recorded_seconds(html: str) -> int:
    """Number of points of the load chart, one per second; 0 if nothing is recorded yet."""
    load = charts_of(html).get("chart-load")
    if load is None:
        return 0
    x = load["data"][0]["x"]
    return len(np.frombuffer(base64.b64decode(x["bdata"]), x["dtype"]))
