"""Documents: safe reads, quantities and durations, atomic replacement, and states of routers of other versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.builders import a_pipeline, a_plan
from trimtab_pipelines.documents import (
    DocumentError,
    dump_yaml,
    load_endpoints,
    load_pipeline,
    load_plan,
    parse,
    parse_plan,
    write_json,
)
from trimtab_pipelines.endpoints import Endpoint, Endpoints
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.quantity import format_bytes, format_cores, format_duration, parse_duration, parse_quantity
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import RecentRequests, RouterState


def test_plan_and_endpoints_round_trip(tmp_path):
    plan = a_plan(a_pipeline(2))
    endpoints = Endpoints(stages={"first": (Endpoint(name="first-0", address="127.0.0.1:80", variants=("small",)),)})
    write_json(tmp_path / "plan.json", plan)
    write_json(tmp_path / "endpoints.json", endpoints)

    assert load_plan(tmp_path / "plan.json") == plan
    assert load_endpoints(tmp_path / "endpoints.json") == endpoints
    assert sorted(path.name for path in tmp_path.iterdir()) == ["endpoints.json", "plan.json"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("spec: [", "not YAML"),
        ("just words", "expected a mapping"),
        ("a: 1\n---\nb: 2", "expected one document, found 2"),
        ("", "expected one document, found 0"),
        ("kind: InferencePipeline\nspec: !!python/object:os.system {}", "not YAML"),
        (
            "apiVersion: trimtab.dev/v2\nmetadata: {name: x}\nspec: {}",
            "apiVersion: Input should be 'trimtab.dev/v1alpha1'",
        ),
        ("kind: InferencePipeline\nspec:\n  slo: {}\n  slo: {}", "duplicate key 'slo', first on line 3"),
        ("kind: Deployment\nmetadata: {name: x}\nspec: {}", "kind: Input should be 'InferencePipeline'"),
        ("x: &x {name: a}\ny: {<<: *x, name: b}\nz: 1", "x: unknown field"),  # a merge key may be overridden
        (b"\xff\xfe\x00", "not UTF-8"),
        (f"spec: {'[' * 70}{']' * 70}", "spec.0.0.0.0.0.0.0: nested more than 64 deep"),
        ("spec: &a {b: [*a]}", "spec"),
        ("spec: {a: {b: .inf}}", "spec.a.b: the number must be finite"),
        (f"spec: {{a: [1, {10**400}]}}", "spec.a.1: the number must be finite"),
        ('spec: {a: "\\ud800"}', "spec.a: the text contains a null character or half"),
        ('spec: {a: ["\\0"]}', "spec.a.0: the text contains a null character"),
    ],
)
def test_invalid_pipeline_file_is_rejected(tmp_path, text, complaint):
    path = tmp_path / "pipeline.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(DocumentError, match=r"pipeline\.yaml") as error:
        load_pipeline(path)
    assert complaint in str(error.value)


@pytest.mark.parametrize("written", ["400", "0.4"])
def test_duration_without_unit_is_rejected_with_suggestions(tmp_path, written):
    text = dump_yaml(a_pipeline(slo={"latency": "100ms"})).replace("latency: 100ms", f"latency: {written}")
    (tmp_path / "pipeline.yaml").write_text(text)

    complaint = f"spec.slo.latency: {written} has no unit; write {written}ms or {written}s"
    with pytest.raises(DocumentError, match=complaint):
        load_pipeline(tmp_path)


def test_duplicate_json_key_is_rejected(tmp_path):
    (tmp_path / "plan.json").write_text('{"kind": "PipelinePlan", "kind": "PipelinePlan"}')

    with pytest.raises(DocumentError, match="duplicate key 'kind'"):
        load_plan(tmp_path / "plan.json")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DocumentError, match=r"nowhere\.yaml: No such file"):
        load_pipeline(tmp_path / "nowhere.yaml")


def test_oversized_file_is_not_read(tmp_path):
    path = tmp_path / "pipeline.yaml"
    with path.open("wb") as file:
        file.truncate(17 * 2**20)

    with pytest.raises(DocumentError, match="larger than 16 MiB"):
        load_pipeline(path)


def test_tensor_name_y_is_quoted_in_yaml():
    pipeline = a_pipeline()
    output = pipeline.spec.outputs[0].replace(name="y")
    document = pipeline.with_spec(outputs=(output,))

    assert "name: 'y'" in dump_yaml(document)


def test_unknown_plan_fields_are_ignored_and_logged(caplog):
    pipeline = a_pipeline(2)
    plan = a_plan(pipeline)
    written = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
    written["spec"]["tokens"] = {"budget": 3}
    for stage in written["spec"]["stages"]:
        stage["placement"] = "zone-a"
    for _ in range(2):
        assert parse_plan(written, "plan.json") == plan
    with pytest.raises(DocumentError, match=r"spec\.tokens: unknown field"):
        parse(PipelinePlan, written, "plan.json")

    fields = "spec.stages.0.placement, spec.stages.1.placement, spec.tokens"
    assert sum(fields in record.message for record in caplog.records) == 1


def test_invalid_plan_with_unknown_fields_is_rejected():
    written = a_plan(a_pipeline()).model_dump(mode="json", by_alias=True, exclude_none=True)
    written["spec"] |= {"tokens": 3, "generation": "first"}
    with pytest.raises(DocumentError) as error:
        parse_plan(written, "plan.json")

    assert "spec.generation" in str(error.value)
    assert "tokens" not in str(error.value)
    with pytest.raises(DocumentError, match="expected a mapping"):
        parse_plan(["a plan"], "plan.json")


@pytest.mark.parametrize("written", [{"1": -0.5}, {"0": 1.0}, {"1": 1e300}])
def test_invalid_seconds_of_a_plan_are_named(written):
    plan = a_plan(a_pipeline()).model_dump(mode="json", by_alias=True, exclude_none=True)
    plan["spec"]["stages"][0]["serviceSeconds"] = written

    with pytest.raises(DocumentError, match=r"spec\.stages\.0\.serviceSeconds"):
        parse_plan(plan, "plan.json")


def test_unknown_fields_are_ignored_and_absent_ones_default():
    state = RouterState.model_validate({"stages": {"read": {"variant": "small", "temperature": 3}}, "mood": "well"})

    assert state.stages["read"].variant == "small"
    assert state.stages["read"].rows_per_request is None
    assert (state.ready, state.served) == (False, None)


@pytest.mark.parametrize("wrong", [{}, {"stages": []}, {"stages": {"read": {"queue_rows": -1}}}, {"stages": {"": 1}}])
def test_invalid_router_state_is_rejected(wrong):
    with pytest.raises(ValidationError):
        RouterState.model_validate(wrong)


def test_every_outcome_has_a_count():
    assert {end.word for end in RequestOutcome} < set(RecentRequests.model_fields)


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("500m", 0.5),
        ("2", 2.0),
        (2, 2.0),
        ("0.1", 0.1),
        ("1Ki", 1024.0),
        ("1.5Gi", 1.5 * 2**30),
        ("3k", 3000.0),
        (".5", 0.5),
    ],
)
def test_quantity_is_parsed(written, number):
    assert parse_quantity(written) == number


@pytest.mark.parametrize(
    "written",
    ["", "m", "-1", "1 core", "0x10", "1e3", "nan", "inf", None, True, [], float("nan"), -2, "9" * 32, 10**400],
)
def test_invalid_quantity_is_rejected_with_an_example(written):
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(written)


@pytest.mark.parametrize(
    ("written", "seconds"), [("250ms", 0.25), ("1.5s", 1.5), ("2m", 120.0), ("1h", 3600.0), (3, 3.0)]
)
def test_duration_is_parsed_to_seconds(written, seconds):
    assert parse_duration(written) == seconds


@pytest.mark.parametrize("written", ["", "10", "5 s", "-1s", "1d", None, False, float("inf"), "8785h"])
def test_invalid_duration_is_rejected_with_an_example(written):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(written)


@given(st.integers(0, 10**6))
def test_cores_round_trip(millicores):
    assert parse_quantity(format_cores(millicores / 1000)) == pytest.approx(millicores / 1000)


@given(st.integers(0, 2**50))
def test_bytes_round_trip(size):
    assert parse_quantity(format_bytes(size)) == size


@given(st.integers(0, 10**7))
def test_durations_round_trip(milliseconds):
    assert parse_duration(format_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000)
