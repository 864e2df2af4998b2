"""Loads parsed from text or a trace, and their arrivals: one Poisson process over the whole load."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_loadtester.arrivals import poisson_arrivals
from trimtab_loadtester.load_spec import LoadError, LoadSpec, generate_rates
from trimtab_predictor.trace import read_trace


@pytest.mark.parametrize(
    ("text", "seconds", "rates"),
    [
        ("constant:20", 3, [20, 20, 20]),
        (" 20 ", 3, [20, 20, 20]),
        ("step:5,40@2", 4.5, [5, 5, 40, 40, 40]),
        ("steps:5x2,20x1,0x1", None, [5, 5, 20, 0]),
        ("steps:5x2,20x1,0x1", 6, [5, 5, 20, 0, 0, 0]),
    ],
)
def test_load_has_a_rate_for_each_second(text: str, seconds: float | None, rates: list[float]) -> None:
    assert LoadSpec.parse(text).rates(seconds).tolist() == rates


def test_generated_load_depends_on_its_seed() -> None:
    first, again, other = (LoadSpec.parse(f"generated:low=4,high=40,seed={seed}").rates(300) for seed in (1, 1, 2))

    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert (first.min(), first.max()) == (4, 40)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 50), st.floats(0, 50), st.integers(0, 1000), st.integers(0, 400), st.integers(1, 60))
def test_generated_rates_stay_within_their_bounds(low: float, more: float, seed: int, seconds: int, mean: int) -> None:
    rates = generate_rates(low, low + more, seed, seconds, mean)

    assert rates.size == seconds
    assert np.all((rates >= low) & (rates <= low + more))
    assert np.array_equal(rates, generate_rates(low, low + more, seed, seconds + 100, mean)[:seconds])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ramp:1,2", "load 'ramp:1,2' is not known; write 20 or constant:20"),
        ("constant:many", "load 'constant:many': rate 'many' is not a number; write 20 or constant:20"),
        ("constant:-3", "rate -3 must lie between 0 and"),
        ("constant:nan", "rate nan must lie between 0 and"),
        ("step:5,40", "a step is written RPS,RPS@SECOND, such as step:5,40@60"),
        ("step:5,40@1.5", "second 1.5 must be a whole number of seconds"),
        ("steps:5x30,20", "'20' is not RPSxSECONDS; write for instance steps:5x30,20x30"),
        ("steps:5x0", "length 0 must lie between 1 and"),
        ("generated:low=4,peak=40", "'peak=40' is not one of low=RPS, high=RPS, seed=NUMBER, plateau=SECONDS"),
        ("generated:low=40,high=4", "low 40 is above high 4"),
        ("generated:seed=1.5", "seed 1.5 must be a whole number"),
        ("multimodal:rps=0", "rps 0 must lie between 0.001"),
        ("multimodal:rps=1,seed=0.5", "seed 0.5 must be a whole number"),
        ("multimodal:low=1", "'low=1' is not one of rps=RPS, seed=NUMBER"),
    ],
)
def test_invalid_load_is_rejected_with_a_hint(text: str, message: str) -> None:
    with pytest.raises(LoadError) as caught:
        LoadSpec.parse(text)

    assert message in str(caught.value)


def test_endless_load_requires_a_duration() -> None:
    with pytest.raises(LoadError, match="load 'constant:20' has no end; give a duration in seconds"):
        LoadSpec.parse("constant:20").rates()
    with pytest.raises(LoadError, match="duration 0 s must be above 0"):
        LoadSpec.parse("constant:20").rates(0)


def test_gaps_of_a_trace_send_nothing_and_are_counted() -> None:
    load = LoadSpec.from_counts(np.array([4, np.nan, 6, np.nan, np.nan]), "t", scale=0.5)

    assert load.rates().tolist() == [2, 0, 3, 0, 0]
    assert load.gap_seconds == 3
    assert load.rates(7).tolist() == [2, 0, 3, 0, 0, 2, 0]


def test_speed_up_keeps_the_rates_and_shortens_the_time() -> None:
    counts = np.array([4, 6, np.nan, 8, np.nan, np.nan, 1])

    assert LoadSpec.from_counts(counts, "t", speed_up=2).rates().tolist() == [5, 8, 0, 1]
    assert LoadSpec.from_counts(counts, "t", speed_up=2).gap_seconds == 1
    assert LoadSpec.from_counts(counts[:2], "t", speed_up=0.5).rates().tolist() == [4, 4, 6, 6]


@pytest.mark.parametrize(
    ("counts", "arguments", "message"),
    [
        ([], {}, "trace t is empty; it needs one count"),
        ([1, -2], {}, "trace t has -2 requests in second 1"),
        ([1, np.inf], {}, "trace t has inf requests in second 1"),
        ([1], {"speed_up": 0}, "speed-up 0 must be above 0 and finite"),
        ([1], {"scale": float("nan")}, "scale nan must be above 0 and finite"),
        ([1e6], {"scale": 10}, "trace t: 1e+07 rps is above the maximum of 1e+06"),
    ],
)
def test_invalid_trace_is_rejected(counts: list[float], arguments: dict[str, float], message: str) -> None:
    with pytest.raises(LoadError) as caught:
        LoadSpec.from_counts(np.array(counts, dtype=float), "t", **arguments)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "speed_up", "played"), [(21, 0.7, 30), (7, 0.1, 70), (100, 0.29, 345), (3, 1e-3, 3000), (5, 0.999, 6)]
)
def test_trace_of_any_length_can_be_slowed_down(seconds: int, speed_up: float, played: int) -> None:
    rates = LoadSpec.from_counts(np.arange(1.0, seconds + 1), "t", speed_up=speed_up).rates()

    assert rates.size == played
    assert (rates[0], rates[-1]) == (1.0, seconds)
    assert (np.diff(rates) >= 0).all()
    assert set(rates.tolist()) == set(range(1, seconds + 1))


def test_slowed_trace_starts_each_second_exactly() -> None:
    rates = LoadSpec.from_counts(np.arange(100.0), "t", speed_up=0.29).rates()

    assert rates[100] == 29


def test_trace_file_keeps_its_gaps(tmp_path: Path) -> None:
    path = tmp_path / "rps.csv"
    path.write_text("rps\n4\n0\n8\n0\n")
    load = LoadSpec.from_trace(path, scale=2)

    assert load.rates().tolist() == [8, 0, 16, 0]
    assert (load.text, load.gap_seconds) == ("rps.csv", 2)
    assert LoadSpec.from_trace(read_trace(path).excerpt(2, 4)).rates().tolist() == [8, 0]


def test_multimodal_load_has_text_and_image_rates() -> None:
    load = LoadSpec.parse("multimodal:rps=8,seed=2")

    assert load.traffic is not None
    assert load.rates(3600).mean() == pytest.approx(8.0)
    assert load.rates(60).tolist() == load.traffic.rps[:60].tolist()
    assert np.corrcoef(load.traffic.text_rps, load.traffic.image_rps)[0, 1] < 0.5
    assert load.traffic.during(4000).rps.tolist() == load.rates(4000).tolist()


def test_counts_have_poisson_variance() -> None:
    """Variance over mean of counts is 1 in windows far shorter than a second, of a second, and of ten.

    IPA's tester bunches requests into the first 1/rate of each second, which the shortest windows would show.
    """
    arrivals = poisson_arrivals(np.full(4000, 25.0), seed=7)

    for window in (0.1, 1.0, 10.0):
        counts = np.histogram(arrivals, bins=np.arange(0, 4000 + window / 2, window))[0]
        spread = 5 * np.sqrt(2 / counts.size)
        assert abs(counts.var() / counts.mean() - 1) < spread


def test_gaps_are_exponential_and_uncorrelated() -> None:
    gaps = np.diff(poisson_arrivals(np.full(2000, 25.0), seed=3))

    assert gaps.mean() == pytest.approx(1 / 25, rel=0.02)
    assert gaps.std() == pytest.approx(1 / 25, rel=0.03)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.02


def test_counts_follow_the_rate_of_each_second() -> None:
    rates = np.concatenate([np.full(500, 5.0), np.full(500, 40.0), np.zeros(100), np.full(300, 15.0)])
    counts = np.histogram(poisson_arrivals(rates, seed=1), bins=np.arange(rates.size + 1))[0]

    assert counts[:500].sum() == pytest.approx(2500, abs=5 * 50)
    assert counts[500:1000].sum() == pytest.approx(20000, abs=5 * 142)
    assert counts[1000:1100].sum() == 0
    assert counts[1100:].sum() == pytest.approx(4500, abs=5 * 67)


def test_rates_may_hold_for_minutes() -> None:
    rates = np.array([2.0, 0.0, 8.0])
    by_minute = poisson_arrivals(rates, seed=1, interval_seconds=60.0)

    assert np.allclose(by_minute, poisson_arrivals(np.repeat(rates, 60), seed=1))
    with pytest.raises(ValueError, match="rate of second 120 is -1"):
        poisson_arrivals(np.array([1.0, 1.0, -1.0]), seed=1, interval_seconds=60.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 300), max_size=30), st.integers(0, 2**32), st.floats(0.1, 40))
def test_arrivals_ascend_and_skip_empty_seconds(rates: list[float], seed: int, duration: float) -> None:
    arrivals = poisson_arrivals(np.array(rates), seed, duration)

    assert np.all(np.diff(arrivals) >= 0)
    assert np.all((arrivals >= 0) & (arrivals < max(min(duration, len(rates)), 1e-9)))
    assert all(rates[int(second)] > 0 for second in arrivals)
    assert np.array_equal(arrivals, poisson_arrivals(np.array(rates), seed, duration))


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_invalid_rate_is_rejected(rate: float) -> None:
    with pytest.raises(ValueError, match=r"rate of second 1 is .*; rates must be finite and at least 0"):
        poisson_arrivals(np.array([1.0, rate]), seed=0)


def test_too_many_requests_are_rejected() -> None:
    with pytest.raises(ValueError, match="the load amounts to 100000000 requests; at most 20000000"):
        poisson_arrivals(np.full(100, 1e6), seed=0)
