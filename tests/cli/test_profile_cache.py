"""Choice of a profile: one of this machine, these models and these versions."""

import asyncio
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.builders import a_point_profile, a_profile
from tests.cli.pipelines import echo_pipeline, write_echo_pipeline
from trimtab.local import profile_cache
from trimtab.local.profile_cache import find_profile
from trimtab_pipelines.documents import dump_yaml, load_pipeline
from trimtab_pipelines.profile import ModelProfile
from trimtab_profiler.identity import model_identity, this_machine


@pytest.mark.parametrize("package", ["trimtab", "torch"])
def test_cached_profile_of_another_version_is_not_used(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(profile_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    path = write_echo_pipeline(tmp_path)
    pipeline = load_pipeline(path)

    async def at_once(*_: object) -> dict[str, ModelProfile]:
        of = {"pipeline": pipeline.name, "hardware": this_machine()}
        points = [a_point_profile(name, 0.01, 0.002) for name in ("fast", "slow")]
        found = {stage.name: a_profile(stage.name, points) for stage in pipeline.spec.stages}
        return {name: one.model_copy(update={"spec": one.spec.model_copy(update=of)}) for name, one in found.items()}

    monkeypatch.setattr(profile_cache, "profile", at_once)
    assert find_profile(path, pipeline, None) is None
    chosen = asyncio.run(profile_cache.measure_profile(path, pipeline, lambda *_: None))
    assert find_profile(path, pipeline, None) == profile_cache.ProfileChoice(chosen.path, "measured here earlier")

    named = "trimtab.local.profile_cache.version_of"
    monkeypatch.setattr(named, lambda name: version(name) + ("+1" if name == package else ""))
    assert find_profile(path, pipeline, None) is None


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("name: sample", "name: other", "it is of pipeline sample"),
        ("random://?seed=1", "random://?seed=7", "variant fast of stage first was measured with other weights"),
        ("delay_seconds: 0.0", "delay_seconds: 1.0", "with other parameters (delay_seconds)"),
        ("family: echo", "family: ecco", "was measured with family echo, which is ecco now"),
    ],
)
def test_profile_of_another_model_is_not_used(tmp_path: Path, before: str, after: str, reason: str) -> None:
    path = write_echo_pipeline(tmp_path)
    pipeline = load_pipeline(path)
    profiles = {}
    for stage in pipeline.spec.stages:
        found = a_profile(stage.name, [a_point_profile("fast", cores=0.5), a_point_profile("slow", cores=0.5)])
        of = {"models": {v.name: model_identity(v, tmp_path) for v in stage.variants}, "hardware": this_machine()}
        spec = found.spec.model_copy(update={**of, "pipeline": pipeline.name})
        profiles[stage.name] = found.model_copy(update={"spec": spec})
    (tmp_path / "profile.yaml").write_text(dump_yaml(*profiles.values()))
    assert find_profile(path, pipeline, None) is not None

    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    messages: list[str] = []
    assert find_profile(path, load_pipeline(path), None, messages.append) is None
    assert reason in messages[0]
    assert find_profile(path, load_pipeline(path), tmp_path / "profile.yaml", messages.append) is not None
    assert messages[1].startswith("! profile")
    assert reason in messages[1]


def test_model_identity_depends_on_weights(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"one")
    (variant, *_) = echo_pipeline().spec.stages[0].variants
    variant = variant.model_copy(update={"storage_uri": "w.safetensors"})
    before = model_identity(variant, tmp_path)
    path.write_bytes(b"two")
    assert before.describe_change(model_identity(variant, tmp_path)) == "other weights"
    path.write_bytes(b"one")
    assert not before.describe_change(model_identity(variant, tmp_path))
