"""Harness of the benchmarks: grids, means and intervals over seeds, reports, pages, and traces."""

import json
import math
from argparse import Namespace
from dataclasses import dataclass
from functools import partial

import pytest

from benchmarks.harness import charts
from benchmarks.harness.grid import Cell, Evaluation, grid, interval, run_cells
from benchmarks.harness.options import LoadTrace, find_trace, load_trace
from benchmarks.harness.report import Page, Report


@dataclass(frozen=True)
class Value:
    cell: Cell
    value: float


def measure(scale, cell):
    return Value(cell, scale * cell.factor * cell.seed)


CELLS = grid([("a",), ("b",)], ["ours", "theirs"], factors=(0.5, 1.0), seeds=2)


def test_grid_runs_every_combination_in_processes():
    rows = run_cells(partial(measure, 10.0), CELLS, processes=2)

    assert len(CELLS) == 16
    assert {row.cell for row in rows} == set(CELLS)
    assert Evaluation(rows).mean(("a",), "ours", lambda row: row.value, 1.0) == 15.0


def test_means_are_over_seeds_and_optionally_over_loads():
    evaluation = Evaluation([measure(1.0, cell) for cell in reversed(CELLS)])
    mean = partial(evaluation.mean, ("a",), "ours", lambda row: row.value)

    assert (mean(0.5), mean(1.0), mean()) == (0.75, 1.5, 1.125)
    assert [row.cell.seed for row in evaluation.rows(("a",), "ours", 0.5)] == [1, 2]
    assert evaluation.factors(("b",)) == [0.5, 1.0]
    assert evaluation.rows(("c",), "ours") == []


def test_intervals_follow_student():
    three = interval([1.0, 2.0, 3.0])

    assert three.mean == 2.0
    assert three.half == pytest.approx(4.303 * 1.0 / math.sqrt(3))
    assert three.format(1, " %") == "2.0 ±2.5 %"
    assert (interval([1.0]).format(2), interval([]).format(2)) == ("1.00", "–")


def test_report_ends_with_one_line_of_json(capsys):
    report = Report("bench", {"runs": 2})
    report.hold("share", 0.9, ">=", 0.5)
    assert report.finish() == 0
    report.hold("share", 0.1, ">=", 0.5)

    assert report.finish() == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["name"], last["figures"], [bar["holds"] for bar in last["bars"]]) == (
        "bench",
        {"runs": 2},
        [True, False],
    )


def test_page_holds_charts_tables_and_notes_in_order(tmp_path):
    page = Page("Evaluation", "simulated", "2 runs")
    page.add_chart("Chart", "A note.", charts.panels([("left", [charts.bars("b", ["x"], [1.0], "#000")])]))
    page.add_table("Table", "Means.", ("name", "value"), [("<a>", "1")], range(1, 2))
    page.write(tmp_path / "out" / "page.html")

    html = (tmp_path / "out" / "page.html").read_text()
    assert html.index("Chart") < html.index("Table") < html.index("&lt;a&gt;")
    assert '"name":"b"' in html.replace(" ", "")


def test_legend_lists_each_name_once():
    figure = charts.panels([(title, [charts.line("ours", [0], [1.0], "#000")]) for title in "ab"])

    assert [trace.showlegend for trace in figure.data] == [True, False]


def test_another_trace_starts_at_its_first_second(tmp_path):
    own, other = tmp_path / "own.csv", tmp_path / "other.csv"
    other.touch()

    def chosen(trace=None, start=None):
        return load_trace(Namespace(data=tmp_path, trace=trace, trace_start=start), "own.csv", 869_160, "synthetic")

    assert chosen() == LoadTrace(None, 869_160)
    assert chosen(other) == LoadTrace(other, 0)
    assert chosen(other, 7).label == "other.csv, from second 7"
    assert find_trace(None, own, "synthetic") is None
    assert find_trace(None, other, "synthetic") == other
