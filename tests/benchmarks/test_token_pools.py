"""Pools of a large multimodal model: what a replica carries, how the budget is divided, when pools grow and shrink."""

from math import inf

import numpy as np
import pytest

from benchmarks.papers.modserve_day import CapacityPoint, PoolProfile, Scaling, divide, scale


def a_profile(*points, gpus=1):
    return PoolProfile(tuple(CapacityPoint(*point) for point in points), gpus)


def test_capacity_ends_at_the_first_failing_point():
    profile = a_profile((100, 1.0), (200, 2.0), (300, 5.0), (400, 1.5))

    assert profile.capacity(0.9) == 0
    assert profile.capacity(1.0) == 100
    assert profile.capacity(1.5) == 150
    assert profile.capacity(4.9) < 300
    assert profile.capacity(5.0) == 400
    assert profile.replicas(301, 1.5) == 3
    assert profile.replicas(300, 1.5) == 2
    assert profile.replicas(0, 1.5) == 1
    assert profile.replicas(1, 0.5) == inf


@pytest.mark.parametrize("seed", range(40))
def test_split_is_as_cheap_as_any_of_a_fine_grid(seed):
    random = np.random.default_rng(seed)

    def drawn(gpus):
        seconds = np.cumsum(random.uniform(-0.05, 0.8, 5)).clip(min=0.01)
        return a_profile(*zip(np.cumsum(random.uniform(50, 400, 5)), seconds, strict=True), gpus=gpus)

    image, text = drawn(1), drawn(4)
    images, texts, budget = random.uniform(0, 9000), random.uniform(0, 9000), random.uniform(0.2, 5)
    found = divide(
        image,
        text,
        image_tokens_per_second=images,
        text_tokens_per_second=texts,
        slo_seconds=budget + 0.1,
        transfer_seconds=0.1,
    )
    grid = min(image.replicas(images, x) + 4 * text.replicas(texts, budget - x) for x in np.linspace(0, budget, 2001))

    assert (inf if found is None else found.gpus) <= grid
    if found is not None:
        assert image.replicas(images, found.image_seconds) == found.image_replicas
        assert text.replicas(texts, found.text_seconds) == found.text_replicas
        assert found.image_seconds + found.text_seconds == pytest.approx(budget)


def test_pools_grow_at_once_and_shrink_after_quiet_intervals():
    state = scale(Scaling(4), 9, 1.0)
    assert state == Scaling(9)
    for needed in (5, 7):
        state = scale(state, needed, 1.0)
        assert state.replicas == 9
    state = scale(state, 3, 1.0)
    assert state == Scaling(7)
    state = scale(scale(state, 3, 1.0), 7, 1.0)
    assert state == Scaling(7), "a period that needs them all begins the count anew"


def test_missed_slo_adds_replicas_beyond_the_profile():
    assert scale(Scaling(8), 8, 0.98) == Scaling(9)
    assert scale(Scaling(8, (2, 2)), 2, 0.98) == Scaling(9)
    assert scale(Scaling(8), 12, 0.5) == Scaling(12)
