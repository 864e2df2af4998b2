"""Cache of profiles: used while machine and versions are equal."""

import asyncio
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.builders import a_point_profile, a_profile
from tests.cli.pipelines import write_echo_pipeline
from trimtab.local import profile_cache
from trimtab.local.profile_cache import find_profile
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.profile import ModelProfile
from trimtab_profiler.identity import this_machine


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
