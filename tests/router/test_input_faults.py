"""An input that fails lowers what is believed of every point that reads it, until one is seen to hold."""

from pathlib import Path

import numpy as np
import pytest

from trimtab_pipelines.documents import load_pipeline
from trimtab_router.scheduling.accuracy_monitor import AccuracyBaseline, AccuracyMonitor
from trimtab_router.scheduling.accuracy_observations import MIN_ROWS
from trimtab_router.scheduling.broken_inputs import AccuracyEstimate, lower_estimates, suspect_inputs

PIPELINE = Path(__file__).parents[2] / "pipelines" / "digits-av" / "pipeline.yaml"
HEARING = ("all", "audio-video", "audio-text", "audio")
DEAF = {"all": (0.825, 0.839), "audio-video": (0.658, 0.707), "audio-text": (0.423, 0.543), "audio": (0.091, 0.254)}
"""Where sound is noise alone: how often `late` is right (1,500 rows), and how certain it then is."""
BLIND = {"all": (0.577, 0.704), "audio-video": (0.275, 0.537), "video-text": (0.388, 0.636), "video": (0.090, 0.347)}
SCRAMBLED = {"all": (0.793, 0.807), "audio-text": (0.340, 0.500), "video-text": (0.633, 0.739), "text": (0.103, 0.335)}
SENSES = {"audio": DEAF, "video": BLIND, "text": SCRAMBLED}


class Town:
    """Stage `late` of digits-av at twenty rows a second, with inputs that can be made faulty."""

    def __init__(self):
        self.stage = load_pipeline(PIPELINE).spec.stages[0]
        self.points = {point.name: point for point in self.stage.variants[0].points}
        self.watch = AccuracyMonitor(self.stage)
        self.broken = {}
        self.now = 0.0

    def serve(self, point, rows):
        for _ in range(rows):
            self.now += 0.05
            _, confidence = self.broken.get(point, (0.0, self.points[point].measured_accuracy().mean_confidence))
            self.watch.observe(("late", point), "", np.array([confidence]), self.now)
            if self.now % 5.0 < 0.05:
                self.watch.drifted_accuracies(self.now)  # as the adapter asks for it

    def believed(self, point):
        accuracies = self.watch.drifted_accuracies(self.now)
        return accuracies.get(("late", point, ""), self.points[point].accuracy)

    def best(self, points):
        return max(points, key=self.believed)

    def truth(self, point):
        return self.broken[point][0] if point in self.broken else self.points[point].accuracy


@pytest.fixture
def town():
    return Town()


def test_unobserved_points_inherit_the_broken_input(town):
    town.serve("video-text", 1000)
    town.broken = DEAF
    town.serve("all", 400)
    town.serve("video-text", 400)

    for point in HEARING:
        assert town.believed(point) == pytest.approx(town.truth(point), abs=0.025 if point != "audio" else 0.1), point
    assert town.believed("audio") == 0.0, "it hears and nothing else"
    for point in ("video-text", "video", "text"):
        assert town.believed(point) == town.points[point].accuracy, point


def test_overconfident_point_is_not_better_than_without_input(town):
    town.serve("audio-text", 1000)
    town.broken = DEAF
    town.serve("audio-text", 400)
    town.serve("text", 400)

    assert town.believed("audio-text") == pytest.approx(town.truth("audio-text"), abs=0.025)


def test_most_favorable_of_two_explanations_is_used(town):
    town.broken = DEAF
    town.serve("audio-text", 600)

    assert town.believed("video-text") == pytest.approx(0.864), "it may be the sound"
    assert town.believed("audio-video") == pytest.approx(0.8167), "it may be the text"
    assert town.believed("all") == pytest.approx(0.834), "and either way it is worth less than without it"
    assert town.believed("audio-text") == pytest.approx(0.4327)


FAST = [("all", "video-text", "audio-video", "video"), ("audio-text", "text", "audio"), ("audio-text", "video", "text")]


def planned_in_the_end(town, sense, fast):
    town.serve(town.best(fast), 600)
    town.broken = SENSES[sense]
    for _ in range(24):
        town.serve(town.best(fast), 100)
    return town.best(fast)


@pytest.mark.parametrize("fast", FAST, ids=" ".join)
@pytest.mark.parametrize("sense", SENSES)
def test_plan_is_close_to_best_whichever_input_breaks(town, sense, fast):
    planned = planned_in_the_end(town, sense, fast)

    assert town.truth(planned) >= max(map(town.truth, fast)) - 0.05
    assert sense != "audio" or town.believed(planned) == pytest.approx(town.truth(planned), abs=0.02)


def test_confirmed_point_clears_the_input(town):
    town.broken = {"all": DEAF["all"]}
    town.serve("video-text", 300)
    town.serve("all", 400)
    town.serve("video-text", 400)
    assert town.believed("audio-video") < 0.75

    town.serve("audio-video", 400)
    assert town.believed("audio-video") == town.points["audio-video"].accuracy
    assert town.believed("audio-text") == town.points["audio-text"].accuracy


def test_observations_before_the_fall_clear_nothing(town):
    town.serve("audio-text", 1000)
    town.serve("video-text", 1000)
    town.broken = DEAF
    town.serve("all", 400)
    town.serve("video-text", 400)

    assert town.believed("audio-text") == pytest.approx(0.40, abs=0.01)


def test_recovered_input_is_trusted_after_observation(town):
    town.broken = DEAF
    town.serve("all", 400)
    town.serve("video-text", 400)
    town.broken = {}
    town.serve("audio-video", 400)

    assert town.believed("audio-text") == town.points["audio-text"].accuracy


def test_escalation_only_point_reports_its_input_too(town):
    town.serve("video-text", 400)
    look = AccuracyBaseline(("late", "video-text"), np.array([0.5]), 0.2)
    for _ in range(200):
        town.watch.observe_escalated(("late", "all"), "", np.array([0.4]), look, town.now)
    assert town.believed("all") < 0.7, "of the rows that were doubted"
    town.serve("video-text", 500)

    assert town.believed("audio-video") == pytest.approx(0.6765, abs=0.001)
    assert town.believed("video-text") == pytest.approx(0.864)


def test_small_loss_is_no_broken_input(town):
    measured = town.points["audio-text"].measured_accuracy().mean_confidence
    town.broken = {"audio-text": (0.64, measured - 0.075)}
    town.serve("audio-text", 5 * MIN_ROWS)

    assert list(town.watch.drifted_accuracies(town.now)) == [("late", "audio-text", "")]


def test_points_with_equal_inputs_say_nothing_about_others():
    both = frozenset("ab")

    assert (
        suspect_inputs([AccuracyEstimate("one", both, 0.9, observed=0.2), AccuracyEstimate("two", both, 0.8)])
        == frozenset()
    )


def test_suspicion_lasts_while_half_the_loss_remains():
    rest = (AccuracyEstimate("video", frozenset("v"), 0.7), AccuracyEstimate("text", frozenset("t"), 0.4))
    for lost, fallen in ((0.13, "av"), (0.1, ""), (0.05, "")):
        beliefs = [AccuracyEstimate("both", frozenset("vt"), 0.86, observed=0.86 - lost), *rest]
        assert suspect_inputs(beliefs) == (
            frozenset("t") if fallen else frozenset("t") if lost >= 0.064 else frozenset()
        )
        assert suspect_inputs(beliefs, {"t"}) == frozenset("t")
    assert lower_estimates(beliefs, {"t"}) == {"both": pytest.approx(0.67), "text": 0.0}
