"""Multimodal load: sizes, shares and bursts of the trace, from two independent processes."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers.modserve_trace import read_hours, read_minutes, traffic_of
from trimtab_loadtester.multimodal.rates import synthetic_rates
from trimtab_loadtester.multimodal.sizes import (
    IMAGE_CONTEXTS,
    IMAGE_OUTPUTS,
    MIN_TEXT_TOKENS,
    TEXT_CONTEXTS,
    TEXT_OUTPUTS,
    images_at,
    text_tokens_with_images,
)
from trimtab_loadtester.multimodal.traffic import BURST_SHARE, IMAGE_SHARE, Traffic, draw, several_share
from trimtab_predictor.trace import TraceError

DATA = os.environ.get("TRIMTAB_DATA", "")
with_trace = pytest.mark.skipif(not DATA, reason="TRIMTAB_DATA names no folder with the facts of the trace")
RANKS = np.random.default_rng(4).uniform(size=400_000)
LAWS = {
    "input tokens, image requests": IMAGE_CONTEXTS,
    "input tokens, text requests": TEXT_CONTEXTS,
    "output tokens, image requests": IMAGE_OUTPUTS,
    "output tokens, text requests": TEXT_OUTPUTS,
}


def at_random_moments(share=IMAGE_SHARE, rps=100.0):
    return draw(Traffic.steady(rps, 1_000.0, share), seed=1)


def images_of(requests):
    return np.array([one.images for one in requests if one.images])


@with_trace
@pytest.mark.parametrize("row", LAWS)
def test_tokens_have_the_quantiles_of_the_trace(row):
    """Within 3 %, or two tokens: the figures of the trace are known to 2 %."""
    facts = (Path(DATA) / "azure_lmm_facts.md").read_text()
    percents, values = (
        found.split("|")
        for name in ("percentile", row)
        for found in re.findall(rf"^\| {name} \|(.*)\|$", facts, re.MULTILINE)
    )
    drawn = LAWS[row].at(RANKS)
    known = [
        (int(p), float(t.replace(",", "")))
        for p, t in zip(percents, values, strict=True)
        if t.strip(" ,0123456789") == ""
    ]

    assert len(known) >= 20
    for percent, tokens in known:
        assert np.quantile(drawn, percent / 100) == pytest.approx(tokens, rel=0.03, abs=2)


def test_mean_tokens_match_the_trace():
    """2,912 tokens in and 187 out, of all its requests; within 5 %, as quantiles alone do not say what lies between."""
    contexts = (1 - IMAGE_SHARE) * TEXT_CONTEXTS.at(RANKS).mean() + IMAGE_SHARE * IMAGE_CONTEXTS.at(RANKS).mean()
    outputs = (1 - IMAGE_SHARE) * TEXT_OUTPUTS.at(RANKS).mean() + IMAGE_SHARE * IMAGE_OUTPUTS.at(RANKS).mean()

    assert contexts == pytest.approx(2912, rel=0.05)
    assert outputs == pytest.approx(187, rel=0.05)


def test_longest_contexts_follow_the_power_laws():
    """Ten times as rare is 10^(1/1.9) times as long of texts, 10^(1/3.4) beside images, up to what a model reads."""
    for law, exponent in ((TEXT_CONTEXTS, 1.9), (IMAGE_CONTEXTS, 3.4)):
        rare, ten_times = law.at(np.array([0.998, 0.9998]))
        assert ten_times / rare == pytest.approx(10 ** (1 / exponent), rel=0.01)
        assert law.at(np.array([1.0]))[0] == 131_072


@pytest.mark.parametrize(
    ("most", "share"), [(1, 0.660), (4, 0.707), (9, 0.856), (100, 0.945), (441, 0.975), (529, 0.997)]
)
def test_images_of_a_request_have_the_shares_of_the_trace(most, share):
    assert (images_at(RANKS) <= most).mean() == pytest.approx(share, abs=0.003)


def test_requests_have_at_most_sixteen_images():
    images = images_of(at_random_moments())

    assert images.max() == 16
    assert (images_at(RANKS) > 16).mean() == pytest.approx(0.125, abs=0.003)
    assert (images == 16).mean() == pytest.approx(0.144, abs=0.006)
    assert {*images.tolist()} == {1, 4, 9, 16}


def test_text_tokens_are_the_rest_of_the_context():
    ranks = np.array([0.0, 0.4, 0.7, 0.95])

    assert images_at(ranks).tolist() == [1, 1, 4, 196]
    assert text_tokens_with_images(ranks).tolist() == [MIN_TEXT_TOKENS, 1134 - 245, 3740 - 4 * 245, MIN_TEXT_TOKENS]
    beside = [one.text_tokens for one in at_random_moments() if one.images == 1]
    assert np.median(beside) == pytest.approx(779, rel=0.05), "as long as texts without images"


def test_shares_and_rates_are_preserved():
    requests = at_random_moments()

    assert len(requests) == pytest.approx(100_000, abs=5 * 316)
    assert len(images_of(requests)) / len(requests) == pytest.approx(IMAGE_SHARE, abs=0.006)
    arrivals = [one.arrival_seconds for one in requests]
    assert arrivals == sorted(arrivals)
    assert 0 <= arrivals[0] <= arrivals[-1] < 1_000


def test_text_and_image_processes_are_independent():
    """Ten times the images, or none, change neither times nor sizes of text requests."""
    calm = Traffic(np.full(30, 2.0), np.full(30, 1.0), np.zeros(30, dtype=bool))
    busy = Traffic(calm.text_rps, 10 * calm.image_rps, np.ones(30, dtype=bool))
    texts, beside, alone = (
        [one for one in draw(traffic, seed=5) if not one.images]
        for traffic in (calm, busy, Traffic(calm.text_rps, 0 * calm.image_rps, calm.bursts))
    )

    assert texts == beside == alone
    assert draw(calm, seed=5) == draw(calm, seed=5) != draw(calm, seed=6)


def test_bursts_add_images_and_keep_the_mean():
    minutes = 840
    bursts = np.arange(minutes) < round(BURST_SHARE * minutes)
    requests = draw(Traffic.split(np.full(minutes, 4.0), bursts=bursts), seed=2)
    burst_ends = bursts.sum() * 60.0
    among = [one for one in requests if one.arrival_seconds < burst_ends]
    after = [one for one in requests if one.arrival_seconds >= burst_ends]

    assert len(among) / burst_ends == pytest.approx(len(after) / (minutes * 60 - burst_ends), rel=0.03)
    assert images_of(among).mean() / images_of(after).mean() == pytest.approx(3.4, rel=0.1)
    assert (images_of(requests) == 1).mean() == pytest.approx(0.660, abs=0.006)
    average = BURST_SHARE * several_share(burst=True) + (1 - BURST_SHARE) * several_share(burst=False)
    assert average == pytest.approx(0.34)


@with_trace
def test_hourly_peaks_match_the_trace():
    """The medians of calm hours and of those in bursts, uncut, and how many hours reach 5,000 images a minute.

    Within a quarter: one long video more or less is a tenth of a peak.
    """
    folder = Path(DATA)
    hours = read_hours(folder / "azure_lmm_hourly_dev.csv")
    counts = read_minutes(folder / "azure_lmm_per_minute_dev.csv.gz")
    requests = draw(traffic_of(counts, hours), seed=1, max_images=10_000)
    minutes = (np.array([one.arrival_seconds for one in requests]) / 60).astype(int)
    peaks = np.bincount(minutes, [one.images for one in requests], minlength=5040).reshape(84, 60).max(axis=1)

    assert len(requests) == pytest.approx(627_019, rel=0.005)
    assert np.median(peaks[~hours.bursts]) == pytest.approx(2_300, rel=0.25)
    assert np.median(peaks[hours.bursts]) == pytest.approx(10_700, rel=0.25)
    assert 22 <= (peaks >= 5_000).sum() <= 36


def test_synthetic_minutes_vary_as_those_of_the_trace():
    """P1, P10, P50, P90 and P99 over the mean within an eighth, and how much two neighbours differ within a fifth."""
    traffic = synthetic_rates(20_000, seed=1)
    counts = np.random.default_rng(2).poisson(124.41 * traffic.rps / traffic.rps.mean())

    for percent, known in ((1, 42), (10, 65), (50, 119), (90, 190), (99, 277)):
        assert np.quantile(counts, percent / 100) == pytest.approx(known, rel=0.125)
    assert (np.diff(counts) ** 2).mean() / 2 / counts.mean() == pytest.approx(11, rel=0.2)
    assert traffic.image_rps.sum() / traffic.rps.sum() == pytest.approx(IMAGE_SHARE, abs=0.05)


def test_synthetic_bursts_last_hours_and_a_third_of_the_time():
    bursts = synthetic_rates(100_000, seed=3).bursts
    edges = np.flatnonzero(np.diff(bursts.astype(int)))
    lengths = np.diff(edges)[int(bursts[0]) :: 2]

    assert bursts.mean() == pytest.approx(BURST_SHARE, abs=0.05)
    assert lengths.min() >= 2 * 60
    assert lengths.max() <= 10 * 60


def test_text_and_image_rates_are_split_by_hour(tmp_path):
    table = tmp_path / "hours.csv"
    heads = "text_requests_per_min_read_off,image_requests_per_min_by_difference,images_per_min_peak_read_off"
    table.write_text(f"{heads}\n30,90,4999\n60,20,5000\n")
    traffic = traffic_of([120.0] * 60 + [80.0] * 60, read_hours(table))

    assert traffic.text_rps[[0, 60]].tolist() == [0.5, 1.0]
    assert traffic.bursts[[0, 59, 60]].tolist() == [False, False, True]
    assert traffic.scaled(4.0).rps.mean() == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("read", "text", "complaint"),
    [
        (read_hours, "hour,half\n1,dev\n", "it needs text_requests_per_min_read_off"),
        (read_minutes, "minute,requests\n", "no row ends with a number"),
    ],
)
def test_table_without_its_columns_is_rejected(tmp_path, read, text, complaint):
    table = tmp_path / "table.csv"
    table.write_text(text)

    with pytest.raises(TraceError, match=rf"table\.csv.*{complaint}"):
        read(table)


def test_mismatched_rates_and_empty_loads_are_rejected():
    with pytest.raises(ValueError, match="they must be equal"):
        Traffic(np.ones(2), np.ones(3), np.zeros(2, dtype=bool))
    with pytest.raises(ValueError, match="all rates are 0"):
        Traffic.split(np.zeros(3)).scaled(1.0)
