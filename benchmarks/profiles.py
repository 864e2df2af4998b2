"""How fast a pipeline's points are on this machine, measured once and kept for the runs that follow."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab_pipelines.documents import load_pipeline, load_profiles
from trimtab_pipelines.profile import ModelProfile
from trimtab_profiler.profile import PROFILE_FILE, ProfileOptions, profile, write_profiles


async def profiled(
    source: Path, out: Path, only: Mapping[str, Sequence[str]] | None = None
) -> Mapping[str, ModelProfile]:
    """The profiles that an earlier run left in `out`; else the pipeline in `source` is profiled quickly.

    `only` names the variants of each stage that are wanted; all of them where it is None.
    """
    if not _is_kept(out):
        pipeline = load_pipeline(source / "pipeline.yaml")
        write_profiles(await profile(pipeline, source, ProfileOptions.quick(pipeline, only), lambda _: None), out)
    return load_profiles(out / PROFILE_FILE)


def _is_kept(out: Path) -> bool:
    out.mkdir(parents=True, exist_ok=True)
    return (out / PROFILE_FILE).exists()
