"""Variants with a colocated encoder: validation, inputs, and plans without encoder replicas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import a_point_profile, a_variant
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.disaggregated import an_encoder
from tests.router.layouts import PULLS, WHOLE, a_choosing_pipeline, a_choosing_writer, laid_out
from trimtab_pipelines.documents import DocumentError, validate_plan
from trimtab_pipelines.model_spec import model_spec
from trimtab_pipelines.plan import idle_stages
from trimtab_pipelines.profile import ChatProfile, LatencyCurve, PointProfile, prefill_seconds


def test_each_variant_reads_its_placements_inputs(tmp_path):
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
    "no encoder stage": ([a_writer(variants=[a_variant(encoder="Colocated")])], "optional inputs images"),
    "no generation stage": (
        [an_encoder() | {"variants": [a_variant(encoder="Colocated")]}, a_writer()],
        "role Generate",
    ),
    "required images": (needed(), "optional inputs images"),
    "another reader of the encoder": (two_writers(), "stage second reads it too"),
    "other images": (other_images(), "read the same images"),
}


@pytest.mark.parametrize(("stages", "message"), WRONG.values(), ids=WRONG)
def test_invalid_encoder_placement_is_rejected(stages, message):
    inputs = [*a_choosing_pipeline().spec.model_dump(by_alias=True)["inputs"], OTHERS]
    with pytest.raises(ValueError, match=message):
        a_chat_pipeline(stages, inputs=inputs)


def test_plan_idles_encoder_only_for_colocated_variant():
    pipeline = a_choosing_pipeline()
    whole, apart = (laid_out(pipeline, apart=apart) for apart in (False, True))

    assert idle_stages(validate_plan(whole, pipeline), pipeline.spec) == {"encode"}
    assert idle_stages(validate_plan(apart, pipeline), pipeline.spec) == frozenset()
    starving = apart.model_copy(deep=True)
    starving.spec.stages[0].__dict__["replicas"] = 0
    with pytest.raises(DocumentError, match="encode has 0 replicas"):
        validate_plan(starving, pipeline)


def test_budget_excludes_optional_encoders():
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
def test_chat_times_are_linear_in_images(images, size):
    shown = a_chat_profile().for_chats(images)

    expected = (1 + images) * (0.004 + 0.002 * size)
    assert shown.latency_seconds(size) == pytest.approx(expected)
    assert shown.to_first_token.latency_seconds(size) == pytest.approx(expected / 2)
    assert shown.throughput_rps(size) == pytest.approx(size / expected)
    assert shown.for_chats(images).chats is not None


def test_inverted_measurements_do_not_extrapolate_to_a_gain():
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
    changes = {"prompt_tokens": 26.0, "text_prompt_tokens": 10.0, "prefill_seconds": READING}
    return own.model_copy(update={"chats": own.chats.model_copy(update=changes)})


@given(images=st.floats(0, 8), size=st.sampled_from([1, 4, 8]), more=st.floats(0, 5_000))
def test_extra_prompt_tokens_add_prefill_time_per_chat(images, size, more):
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
def test_fewer_or_unknown_tokens_cost_as_profiled(tokens):
    profile = a_profile_that_tells_of_prompts()

    assert profile.for_chats(2.0, tokens) == profile.for_chats(2.0)
    assert a_chat_profile().for_chats(2.0, 9_000.0) == a_chat_profile().for_chats(2.0)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (10, 1.0), (15, 1.5), (30, 4.0), (40, 6.0), (60, 10.0)])
def test_prefill_seconds_interpolate_and_extrapolate(tokens, seconds):
    assert prefill_seconds({10: 1.0, 20: 2.0, 40: 6.0}, tokens) == pytest.approx(seconds)
    assert prefill_seconds({}, tokens) == 0.0
    assert prefill_seconds({20: 3.0}, tokens) == 3.0
