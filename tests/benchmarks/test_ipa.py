"""IPA's evaluation: dominance over seeds, noise, and cells without requests."""

from math import nan

import pytest
import torch

from benchmarks.harness.grid import Cell, Evaluation
from benchmarks.papers.ipa import judge, place
from benchmarks.papers.ipa_cells import LATENCY_QUANTILES, ORACLE, OURS, REACTIVE, PlannerRow
from benchmarks.papers.ipa_checkpoints import network, sizes
from benchmarks.papers.ipa_measured import COLUMNS, CORES, read_measured
from tests.builders import a_variant, an_echo_pipeline
from tests.ipa import BESIDE_THE_TABLES, VARIANTS

CASE = ("nlp", "bursty")
RT_DETR = {"rtdetr-r18": 20.0, "rtdetr-r34": 31.0, "rtdetr-r50": 42.5, "rtdetr-r101": 76.0}


def a_row(method, cores=4.0, served=0.8, violations=0.0, seed=1):
    return PlannerRow(
        Cell(CASE, method, seed=seed), 100, served, served, cores, violations, 0.0, 0.0, (0.1,) * len(LATENCY_QUANTILES)
    )


def rows(method, cores, served):
    return [a_row(method, c, a, seed=seed) for seed, (c, a) in enumerate(zip(cores, served, strict=True))]


SAME = [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("ours", "rival", "standing"),
    [
        (([4, 4, 4], SAME), ([6, 6, 6], SAME), "above"),
        (([4, 4, 4], SAME), ([4, 4, 4], SAME), "on"),
        (([4, 4, 4], SAME), ([4.01, 4.01, 4.01], SAME), "on"),
        (([6, 6, 6], SAME), ([4, 4, 4], SAME), "below FA2-low"),
        (([4, 4, 4], SAME), ([4, 4, 4], [0.6, 0.6, 0.6]), "below FA2-low"),
        (([4, 5, 4.1], SAME), ([4.2, 4.2, 4.5], SAME), "on"),
    ],
    ids=["cheaper", "equal", "cheaper by a hair", "rival cheaper", "rival more accurate", "within the noise"],
)
def test_standing_compares_plans_with_each_baseline(ours, rival, standing):
    evaluation = Evaluation([*rows(OURS, *ours), *rows("FA2-low", *rival)])

    assert place(evaluation, CASE).label == standing


def test_margin_is_over_the_best_rival_with_no_more_cores():
    rivals = [*rows("FA2-low", [2, 2], [0.4, 0.4]), *rows("FA2-high", [6, 6], [0.8, 0.8])]

    assert place(Evaluation([*rows(OURS, [4, 4], [0.5, 0.5]), *rivals]), CASE).margin == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("ours", "oracle", "holds"),
    [(0.005, 0, True), (0.5, 0, False), (nan, 0, False), (nan, nan, False), (0.5, 0.5, False)],
)
def test_unavoidable_or_unknown_violations_do_not_hold(ours, oracle, holds):
    others = [a_row(method) for method in (REACTIVE, "RIM")]
    evaluation = Evaluation([a_row(OURS, violations=ours), a_row(ORACLE, violations=oracle), *others])

    assert judge(evaluation, 1.0).holds is holds
    assert not judge(evaluation, 1.0, mixes=True).holds
    assert not judge(Evaluation([]), 1.0).holds


@pytest.mark.parametrize("variant", sizes())
def test_full_size_checkpoint_has_the_published_parameters(variant):
    published = {name: row.millions for name, row in (VARIANTS | BESIDE_THE_TABLES).items()} | RT_DETR
    with torch.device("meta"):
        counts = [parameter.numel() for parameter in network(variant).parameters()]

    assert sum(counts) / 1e6 == pytest.approx(published[variant], rel=0.016)


@pytest.mark.parametrize(("slower", "cores"), [(1.0, 1.0), (4.0, 2.0), (40.0, 2.0)])
def test_measured_variant_has_the_cores_of_equation_1(tmp_path, slower, cores):
    pipeline = an_echo_pipeline([a_variant("light"), a_variant("heavy")])
    rows = [
        (pipeline.name, "first", name, str(c), str(batch), str(seconds), str(seconds), str(batch / seconds))
        for name, factor in (("light", 1.0), ("heavy", slower))
        for c in CORES
        for batch in (1, 4)
        for seconds in [factor * 0.1 * batch / c]
    ]
    (tmp_path / "measured.csv").write_text("\n".join(map(",".join, [COLUMNS, *rows])))

    planned, profiles = read_measured(pipeline, tmp_path / "measured.csv", {"first": {"threshold_rps_paper": "4"}})

    assert [variant.resources.cpu for variant in planned.spec.ordered_stages[0].variants] == [1.0, cores]
    assert [point.cores for point in profiles["first"].spec.points] == [1.0, cores]
    assert planned.spec.slo.latency_seconds == pytest.approx(5 * 0.1 * (1 + slower) / 2)
