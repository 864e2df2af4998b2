"""Chats of the placement benchmark: their images, and figures of cluster traffic by halves."""

import json

import pytest

from benchmarks.layouts.asking import chats
from benchmarks.layouts.traffic import calm_then_burst, figures
from trimtab_loadtester.multimodal.traffic import draw
from trimtab_loadtester.results import Record, Results, RunFacts
from trimtab_pipelines.request_outcome import RequestOutcome


def a_record(due, images, first, outcome=RequestOutcome.OK):
    return Record(due, due, 0.4, outcome, "200", first_token_seconds=first, between_tokens_seconds=0.01, images=images)


@pytest.mark.parametrize("images", [0, 1, 16])
def test_chats_show_so_many_different_images(images):
    asked = chats("lmm", images, 2, seed=5, stream=False)
    shown = [
        part["image_url"]["url"]
        for body, _ in asked
        for part in body["messages"][0]["content"]
        if part["type"] == "image_url"
    ]

    assert len(shown) == len(set(shown)) == 2 * images
    assert all(body["model"] == "lmm" and body["stream"] is False and answer for body, answer in asked)
    assert asked == chats("lmm", images, 2, seed=5, stream=False)
    json.dumps(asked)


def test_a_burst_brings_more_images_at_the_same_rate():
    load = calm_then_burst(50.0, 100)
    assert load.traffic is not None
    requests = draw(load.traffic.during(200.0), seed=1)
    calm, burst = ([one.images for one in requests if (one.arrival_seconds >= 100) is late] for late in (False, True))

    assert len(burst) == pytest.approx(len(calm), rel=0.1)
    assert sum(burst) > 2.5 * sum(calm)
    assert load.rates(200).tolist() == [50.0] * 200


def test_each_half_is_judged_by_itself_and_by_modality():
    facts = RunFacts("lmm", "mine", 20.0, 2.0, (), 0.0, streamed=True)
    records = [
        a_record(1.0, 0, 0.1),
        a_record(2.0, 1, 0.2),
        a_record(11.0, 0, 0.3, RequestOutcome.LATE),
        a_record(12.0, 16, 0.4),
    ]
    halves = figures(Results.of(facts, records), 10)

    assert (halves["calm_images"], halves["burst_images"]) == (1, 16)
    assert (halves["calm_text_kept_fraction"], halves["burst_text_kept_fraction"]) == (1.0, 0.0)
    assert halves["burst_image_first_token_p99_seconds"] == pytest.approx(0.4, rel=0.01)
    assert (halves["failed"], halves["answered"]) == (0, 4)
