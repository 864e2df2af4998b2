"""The simulated cluster of the ModServe evaluation: its order, its routes, its sums, and what follows the load."""

from math import inf

import numpy as np
import pytest

from benchmarks.papers.modserve import balanced_texts, max_load, read_day
from benchmarks.papers.modserve_cluster import (
    DECOUPLED,
    INTERNVL,
    LLAMA,
    MONOLITH,
    OURS,
    ROUTED,
    Cluster,
    draw_mixture,
    sum_up,
)
from benchmarks.papers.modserve_day import count_tokens, simulate_day
from trimtab_loadtester.multimodal.traffic import Request, Traffic

SYSTEMS = (MONOLITH, DECOUPLED, ROUTED, OURS)


def seconds_of(system, profile, size, asked):
    return [one.seconds for one in Cluster(system, profile, size).run(asked)]


@pytest.mark.parametrize("profile", [LLAMA, INTERNVL])
def test_one_image_takes_a_unit_of_time_in_the_papers_shares(profile):
    assert profile.alone(100, 1) == pytest.approx(1.0)
    assert profile.encode == (0.79 if profile is LLAMA else 0.25)
    assert seconds_of(MONOLITH, profile, (0, 1), [Request(0.0, 100, 1)]) == pytest.approx([1.0])


def test_images_of_one_request_are_encoded_side_by_side():
    asked = [Request(0.0, 100, 4)]
    one, four = (seconds_of(ROUTED, LLAMA, (encoders, 1), asked)[0] for encoders in (1, 4))

    assert one - four == pytest.approx(3 * LLAMA.encode_alone)


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_request_is_answered_once_after_its_prefill(system):
    asked = draw_mixture(4.0, seed=3)[:800]
    answers = Cluster(system, INTERNVL, system.sizes()).run(asked)

    assert [one.request for one in answers] == asked
    for one in answers:
        assert one.seconds >= INTERNVL.prefill(one.request.text_tokens, one.request.images) - 1e-9


def test_unanswered_requests_count_against_attainment():
    answers = Cluster(MONOLITH, LLAMA, (0, 1)).run([Request(at / 1000, 100, 16) for at in range(40)])

    assert sum(one.seconds == inf for one in answers) > 0
    assert sum_up(answers).attainment < 0.99


def test_the_urgent_go_first_and_chunks_let_them_in_between():
    asked = [Request(0.0, 100, 4), Request(1.5, 100, 0)]
    behind, between = (seconds_of(system, INTERNVL, (4, 1), asked)[1] for system in (ROUTED, OURS))

    assert behind > 1.5
    assert between < 0.4


def test_the_idle_instance_is_chosen_by_tokens_and_not_in_turn():
    asked = [Request(0.0, 14_000, 0), Request(0.0, 100, 0), Request(0.01, 100, 0)]

    assert max(seconds_of(ROUTED, INTERNVL, (1, 2), asked)[1:]) < 0.3
    assert max(seconds_of(DECOUPLED, INTERNVL, (1, 2), asked)[1:]) > 5


def test_trace_of_minutes_is_read_and_too_few_are_rejected(tmp_path):
    trace = tmp_path / "minutes.csv"
    trace.write_text("# a note\nminute,requests\n0,10\n1,30\n2,20\n")
    hours = read_day(trace, None, 3, seed=1)

    assert hours.rps.tolist() == pytest.approx([0.5, 1.5, 1.0])
    assert hours.bursts.tolist() == [False, True, False]
    with pytest.raises(ValueError, match="3 minutes of requests; at least 4"):
        read_day(trace, None, 4, seed=1)


def test_minutes_without_requests_are_rejected(tmp_path):
    trace = tmp_path / "minutes.csv"
    trace.write_text("0,0\n1,0\n")

    with pytest.raises(ValueError, match=r"all rates are 0 and cannot be scaled in its first 2 minutes"):
        read_day(trace, None, 2, seed=1)


def test_a_layout_gives_each_pool_what_it_has_to_do():
    assert balanced_texts(LLAMA, 1) < balanced_texts(INTERNVL, 1)
    assert count_tokens(MONOLITH, LLAMA, [Request(0, 10, 2)]) == (0, 10 + 2 * 6404)
    assert count_tokens(OURS, LLAMA, [Request(0, 10, 2)]) == (2 * 6404, 10)
    assert count_tokens(OURS, INTERNVL, [Request(0, 10, 2)]) == (2 * 1280, 10 + 2 * 1280)


def test_sustained_load_is_found_or_none(monkeypatch):
    monkeypatch.setattr("benchmarks.papers.modserve_cluster.REQUESTS", 400)
    carried = max_load(ROUTED, LLAMA, (8, 4), 1)

    assert 0 < carried < 8 / (0.47 * LLAMA.encode_alone)
    monkeypatch.setattr("benchmarks.papers.modserve_cluster.SLO_FACTOR", 0.5)
    assert max_load(ROUTED, LLAMA, (8, 4), 1) == 0


def test_pools_follow_the_load_down_and_up_again(monkeypatch):
    monkeypatch.setattr("benchmarks.papers.modserve_cluster.REQUESTS", 400)
    found = simulate_day(OURS, INTERNVL, Traffic.split(np.array([1.0] * 12 + [9.0] * 8)), seed=1)

    assert found.gpus[11] < found.gpus[0]
    assert found.gpus[-1] > found.gpus[11]
    assert found.mean_gpus < max(found.gpus)
