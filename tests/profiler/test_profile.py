"""Short profile on real replicas, and errors of variants that cannot be measured."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.builders import a_variant, an_echo_pipeline
from trimtab_pipelines.documents import load_pipeline, load_profiles
from trimtab_pipelines.processes.child_process import InputRejected
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.fit import fit_latency
from trimtab_profiler.identity import this_machine
from trimtab_profiler.measure import Effort
from trimtab_profiler.profile import ProfileOptions, Progress, fit_errors, profile, write_profiles

SHORT = ProfileOptions(effort=Effort(seconds=0.2, min_batches=6, max_seconds=0.6, rounds=2))


async def test_two_stages_are_measured_on_real_replicas(tmp_path: Path) -> None:
    slow = a_variant("slow", resources={"cpu": "500m"}, maxBatchSize=4, parameters={"delay_seconds": 0.02})
    first = [a_variant("plain", accuracy=0.8, maxBatchSize=2), slow]
    pipeline = an_echo_pipeline(first, [a_variant("last", maxBatchSize=2)])
    reports: list[Progress] = []

    profiles = await profile(pipeline, tmp_path, SHORT, reports.append)

    assert list(profiles) == ["first", "second"]
    assert [(p.stage, p.variant, p.measurement.batch_size) for p in reports] == [
        *(("first", "plain", 1), ("first", "plain", 2)) * 2,
        *(("first", "slow", 1), ("first", "slow", 2), ("first", "slow", 4)) * 2,
        *(("second", "last", 1), ("second", "last", 2)) * 2,
    ]
    assert [(p.done, p.total) for p in reports] == [(n, 14) for n in range(1, 15)]
    half = profiles["first"].spec.point("slow", "default", 0.5)
    assert half is not None
    assert 0.04 <= half.latency_seconds(1, quantile=0.5) < 0.1  # 20 ms on a core of which it has half
    assert half.throughput_rps(4) < 100
    measured = {p.measurement.batch_size: p.measurement for p in reports if p.variant == "slow"}
    for size, last in measured.items():
        assert half.latency_seconds(size, quantile=0.5) == pytest.approx(2 * last.latency_seconds_p50)
        assert half.throughput_rps(size) == pytest.approx(last.throughput_rps / 2)
    assert profiles["first"].spec.stage_slo_seconds == pytest.approx(
        5 / 2 * sum(p.measurements[0].latency_seconds_mean for p in profiles["first"].spec.points)
    )
    assert profiles["first"].spec.base_allocation == {"plain": 1.0, "slow": 0.5}
    assert len(fit_errors(profiles)) == 7
    assert profiles["first"].spec.inputs == "Drawn"
    assert half.fit == fit_latency(list(measured), [2 * last.latency_seconds_mean for last in measured.values()])

    write_profiles(profiles, tmp_path / "out")
    assert load_profiles(tmp_path / "out") == profiles


async def test_batches_beyond_the_time_limit_are_skipped(tmp_path: Path) -> None:
    slow = a_variant("slow", maxBatchSize=64, parameters={"delay_seconds": 0.02})
    rows = {"request.inputs.x": np.ones((2, 3), np.float32)}
    options = ProfileOptions(effort=Effort(0.05, 2, 0.1, rounds=2), longest_batch_seconds=0.01, rows=rows)
    reports: list[Progress] = []

    profiles = await profile(an_echo_pipeline([slow]), tmp_path, options, reports.append)

    assert [m.batch_size for m in profiles["first"].spec.points[0].measurements] == [1]
    assert profiles["first"].spec.longest_batch_seconds == 0.01
    assert profiles["first"].spec.inputs == "Samples"
    assert [(p.done, p.total) for p in reports] == [(1, 14), (14, 14)]


async def test_variant_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    broken = a_variant("broken", parameters={"speed": 3})

    with pytest.raises(InputRejected, match=r"^model broken: family 'echo': parameters\.speed: .*$"):
        await profile(an_echo_pipeline([broken]), tmp_path, SHORT)


def test_hardware_is_detected(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some Core 9\n")

    assert this_machine(tmp_path / "cpuinfo").processor == "Some Core 9"
    assert this_machine(tmp_path / "absent").processor
    assert this_machine().node_cores >= 1


async def test_generation_is_measured_to_first_token_and_text_only(tmp_path: Path) -> None:
    file = Path("pipelines/lmm-digits/planned.yaml")
    document = load_pipeline(file).model_dump(mode="json", by_alias=True, exclude_none=True)
    for stage in document["spec"]["stages"]:
        stage["batchSizes"] = [1, 2]
    pipeline = InferencePipeline.model_validate(document)
    options = ProfileOptions(effort=Effort(0.02, 2, 0.1, rounds=1), planned_batches_only=True)
    reports: list[Progress] = []

    profiles = await profile(pipeline, file.parent, options, reports.append)

    # 2 of an encoder; 4 × 2 of each writer, and 5 lengths of prompts, one of which is too long for it
    assert [p.total for p in reports] == [28] * 26
    assert [p.done for p in reports] == [*range(1, 11), *range(12, 24), *range(25, 29)]
    assert profiles["encode"].spec.points[0].chats is None
    for name in ("decoder-only", "whole"):
        point = profiles["answer"].spec.point(name, "default", 1.0)
        assert point is not None
        assert point.chats is not None
        assert point.chats.tokens > 1
        for curve in (
            point.chats.time_to_first_token,
            point.chats.text_only,
            point.chats.text_only_time_to_first_token,
        ):
            assert [each.batch_size for each in curve.measurements] == [1, 2]
        tokens = sorted(point.chats.prefill_seconds)
        assert tokens[0] == pytest.approx(point.chats.text_prompt_tokens, abs=2.0)
        assert len(tokens) == 4
        assert all(2 * few < many < 5 * few for few, many in pairwise(tokens))
        assert point.chats.prefill_seconds[tokens[-1]] > point.chats.prefill_seconds[tokens[0]]
        assert (
            point.chats.prompt_tokens > point.chats.text_prompt_tokens + 10
        )  # an image is sixteen tokens and its marks
    write_profiles(profiles, tmp_path)
    assert load_profiles(tmp_path) == profiles

    alone = await profile(
        pipeline, file.parent, replace(options, only={name: ["decoder-only"] for name in ("encode", "answer")})
    )
    assert [point.variant for point in alone["answer"].spec.points] == ["decoder-only"]
