"""Variants that read images themselves: where they may stand, what they read, and plans that do without encoders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import a_point_profile, a_variant
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.layouts import PULLS, WHOLE, a_choosing_pipeline, a_choosing_writer, laid_out
from tests.router.parted import an_encoder
from trimtab_pipelines.documents import DocumentError
from trimtab_pipelines.model_spec import model_spec
from trimtab_pipelines.plan_validation import idle_stages, validate_plan
from trimtab_pipelines.prefill_time import prefill_seconds
from trimtab_pipelines.profile import ChatProfile, LatencyCurve, PointProfile


def test_each_variant_reads_what_is_its_own(tmp_path):
    pipeline = a_choosing_pipeline()
    text = pipeline.spec.stage("text")

    def read(name):
        return [each.name for each in model_spec(pipeline, tmp_path, text, text.variant(name), 1.0).inputs]

    assert read(PULLS) == ["messages", "options", "references"]
    assert read(WHOLE) == ["messages", "options", "images"]
    assert pipeline.spec.encoders == {"text": "encode"}


def two_writers():
    second = a_choosing_writer() | {"name": "second", "variants": [a_variant()]}
    return [an_encoder(), a_choosing_writer(), second]


def other_images():
    writer = a_choosing_writer()
    writer["inputs"][2]["from"] = "request.inputs.others"
    return [an_encoder(), writer]


def needed():
    writer = a_choosing_writer()
    writer["inputs"][2]["optional"] = False
    return [an_encoder(), writer]


OTHERS = {"name": "others", "datatype": "BYTES", "shape": [-1], "optional": True}
WRONG = {
    "where nothing is pulled": ([a_writer(variants=[a_variant(encoder="Colocated")])], "optional inputs images"),
    "where nothing is written": (
        [an_encoder() | {"variants": [a_variant(encoder="Colocated")]}, a_writer()],
        "role: Generate",
    ),
    "images that are needed": (needed(), "optional inputs images"),
    "another reader of what is encoded": (two_writers(), "may do without encode, which second reads"),
    "of other images": (other_images(), "read the same images"),
}


@pytest.mark.parametrize(("stages", "words"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_chosen_is_refused_by_name(stages, words):
    inputs = [*a_choosing_pipeline().spec.model_dump(by_alias=True)["inputs"], OTHERS]
    with pytest.raises(ValueError, match=words):
        a_chat_pipeline(stages, inputs=inputs)


def test_a_plan_does_without_encoders_only_where_images_are_read_whole():
    pipeline = a_choosing_pipeline()
    whole, apart = (laid_out(pipeline, apart=apart) for apart in (False, True))

    assert idle_stages(validate_plan(whole, pipeline), pipeline.spec) == {"encode"}
    assert idle_stages(validate_plan(apart, pipeline), pipeline.spec) == frozenset()
    starving = apart.model_copy(deep=True)
    starving.spec.stages[0].__dict__["replicas"] = 0
    with pytest.raises(DocumentError, match="encode has 0 replicas, and what it gives is read"):
        validate_plan(starving, pipeline)


def test_a_budget_need_not_hold_encoders_that_a_whole_reader_does_without():
    core = {"cpu": "1"}
    encoder = an_encoder() | {"variants": [a_variant(resources=core)]}
    writer = a_choosing_writer() | {
        "variants": [a_variant(PULLS, resources=core), a_variant(WHOLE, encoder="Colocated")]
    }

    assert a_chat_pipeline([encoder, writer], budget={"cores": "1"}).spec.budget.cores == 1


def a_chat_profile() -> PointProfile:
    """Whole answers to chats with an image take 8 + 4b ms, without 4 + 2b; they begin after half of it."""
    full, text = a_point_profile("whole", 0.008, 0.004), a_point_profile("whole", 0.004, 0.002)
    first, text_first = a_point_profile("whole", 0.004, 0.002), a_point_profile("whole", 0.002, 0.001)
    curves = [LatencyCurve(measurements=each.measurements, fit=each.fit) for each in (first, text, text_first)]
    return full.model_copy(
        update={
            "chats": ChatProfile(
                time_to_first_token=curves[0], text_only=curves[1], text_only_time_to_first_token=curves[2], tokens=3.0
            )
        }
    )


@given(images=st.floats(0, 16), size=st.sampled_from([1, 4, 8, 3]))
def test_times_of_chats_lie_on_a_line_through_no_image_and_one(images, size):
    shown = a_chat_profile().for_chats(images)

    expected = (1 + images) * (0.004 + 0.002 * size)
    assert shown.latency_seconds(size) == pytest.approx(expected)
    assert shown.to_first_token.latency_seconds(size) == pytest.approx(expected / 2)
    assert shown.throughput_rps(size) == pytest.approx(size / expected)
    assert shown.for_chats(images).chats is not None


def test_what_was_measured_by_chance_the_wrong_way_round_is_no_gain_of_many_images():
    slow, fast = a_point_profile("whole", 0.008, 0.004), a_point_profile("whole", 0.004, 0.002)
    one, none = (LatencyCurve(measurements=each.measurements, fit=each.fit) for each in (fast, slow))

    assert none.interpolate(one, 16.0).measurements[0].latency_seconds_p50 == fast.latency_seconds(1, 0.5)
    assert a_point_profile().for_chats(3.0) == a_point_profile()
    assert a_point_profile().to_first_token == a_point_profile()


READING = {10: 0.002, 110: 0.012}


def a_profile_that_tells_of_prompts() -> PointProfile:
    """Ten tokens of words and sixteen of an image; a tenth of a millisecond a token beyond ten."""
    own = a_chat_profile()
    assert own.chats is not None
    told = {"prompt_tokens": 26.0, "text_prompt_tokens": 10.0, "prefill_seconds": READING}
    return own.model_copy(update={"chats": own.chats.model_copy(update=told)})


@given(images=st.floats(0, 8), size=st.sampled_from([1, 4, 8]), more=st.floats(0, 5_000))
def test_tokens_beyond_the_profiled_ones_take_what_reading_them_takes_in_each_chat_of_a_batch(images, size, more):
    profile = a_profile_that_tells_of_prompts()
    usual = profile.for_chats(images)
    longer = profile.for_chats(images, 10.0 + 16.0 * images + more)

    extra = 0.0001 * more
    assert longer.latency_seconds(size) == pytest.approx(usual.latency_seconds(size) + size * extra)
    assert longer.to_first_token.latency_seconds(size) == pytest.approx(
        usual.to_first_token.latency_seconds(size) + size * extra
    )
    assert longer.throughput_rps(size) == pytest.approx(1 / (1 / usual.throughput_rps(size) + extra))


@pytest.mark.parametrize("tokens", [0.0, 5.0, 42.0])
def test_fewer_tokens_than_were_profiled_or_unknown_ones_are_as_dear(tokens):
    profile = a_profile_that_tells_of_prompts()

    assert profile.for_chats(2.0, tokens) == profile.for_chats(2.0)
    assert a_chat_profile().for_chats(2.0, 9_000.0) == a_chat_profile().for_chats(2.0)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (10, 1.0), (15, 1.5), (30, 4.0), (40, 6.0), (60, 10.0)])
def test_seconds_to_read_lie_on_straight_lines_and_go_on_beyond_the_last(tokens, seconds):
    assert prefill_seconds({10: 1.0, 20: 2.0, 40: 6.0}, tokens) == pytest.approx(seconds)
    assert prefill_seconds({}, tokens) == 0.0
    assert prefill_seconds({20: 3.0}, tokens) == 3.0
