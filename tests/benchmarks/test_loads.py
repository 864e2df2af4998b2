"""A load that was found is used again under the settings that it was found under, and under no others."""

import json
from argparse import Namespace
from math import inf
from pathlib import Path

import pytest

from benchmarks.loads import KnownLoads
from benchmarks.modalities.__main__ import settings_of as modalities_settings
from benchmarks.modalities.holding import held
from benchmarks.modalities.searching import sought
from benchmarks.tokens_served.__main__ import Bench, found_load
from trimtab_profiler.profile import PROFILE_FILE


@pytest.fixture
def out(tmp_path):
    (tmp_path / PROFILE_FILE).write_text("kind: ModelProfile\n")
    return tmp_path


def modalities(out, **changes):
    return Namespace(**{"cores": 0.5, "rows": "8..24", "floor": 0.78, "recordings": None, "out": out, **changes})


def known(out, **changes):
    return KnownLoads(out / "loads.json", modalities_settings(modalities(out, **changes)))


def test_a_load_is_known_again_by_its_name(out):
    known(out).keep("ours", 41.5)
    known(out).keep("all senses", 12.0)

    assert (known(out).get("ours"), known(out).get("all senses"), known(out).get("ours, one look")) == (
        41.5,
        12.0,
        None,
    )


@pytest.mark.parametrize("changed", [{"cores": 1.0}, {"rows": "1"}, {"floor": 0.5}, {"recordings": Path("voices")}])
def test_a_load_of_other_settings_is_not_known(out, changed):
    known(out).keep("ours", 41.5)

    assert known(out, **changed).get("ours") is None
    known(out, **changed).keep("ours", 80.0)
    assert known(out, **changed).get("ours") == 80.0
    assert known(out).get("ours") is None


def test_a_load_of_other_profiles_is_not_known(out):
    known(out).keep("ours", 41.5)
    (out / PROFILE_FILE).write_text("kind: ModelProfile\n# measured anew\n")

    assert known(out).get("ours") is None


@pytest.mark.parametrize("written", ['{"ours": 41.5}', "[]", "{", '{"ours": {"settings": null}}'])
def test_a_file_of_before_or_a_broken_one_tells_no_loads(out, written):
    (out / "loads.json").write_text(written)

    assert known(out).get("ours") is None
    known(out).keep("ours", 3.0)
    assert json.loads((out / "loads.json").read_text())["ours"]["rps"] == 3.0


class Searching(Bench):
    """Finds a load at once."""

    searched = 0

    async def load(self):
        self.searched += 1
        self._rps = 250.0
        return 250.0


def a_bench(out, **changes):
    return Searching(
        Namespace(**{"deadline": 1.2, "seconds": 16, "trace": None, "trace_start": 0, "out": out, **changes}), out, {}
    )


async def test_a_phase_without_a_known_load_searches_for_one_first(out):
    bench = a_bench(out)

    assert [await bench.rps(), await bench.rps()] == [250.0, 250.0]
    assert bench.searched == 1


async def test_a_phase_with_a_known_load_of_the_same_settings_takes_it(out):
    bench = a_bench(out)
    bench.known.keep("three in ten missed", 180.0)

    assert (await bench.rps(), bench.searched) == (180.0, 0)
    assert await a_bench(out, deadline=0.6).rps() == 250.0
    (out / "rps.csv").write_text("rps\n" + "4\n" * 16)
    assert await a_bench(out, trace=out / "rps.csv").rps() == 250.0


@pytest.mark.parametrize("carries", [30.0, 200.0, 40_000.0])
async def test_load_is_found_on_slow_and_fast_machines(carries):
    tried = []

    async def offer(rps, number):
        tried.append((number, rps))
        return max(0.0, 1.0 - carries / rps)

    runs = await sought(offer, float, 0.3, 200.0, close=0.04, tries=12)

    assert found_load(runs[-1]).holds
    assert [number for number, _ in tried] == list(range(1, len(tried) + 1))


async def test_a_load_that_is_not_found_does_not_hold():
    async def offer(_rps, _number):
        return 0.0

    runs = await sought(offer, float, 0.3, 200.0, close=0.04, tries=3)

    assert len(runs) == 3
    assert not found_load(runs[-1]).holds
    assert not found_load(inf).holds


def test_no_group_is_left_where_its_share_cannot_be_set(tmp_path, monkeypatch):
    def refuses(path, *_):
        raise PermissionError(path)

    (tmp_path / "cgroup.procs").touch()
    monkeypatch.setattr("benchmarks.modalities.holding.ROOT", tmp_path)
    monkeypatch.setattr(Path, "write_text", refuses)
    with held([1], 0.5) as is_held:
        assert not is_held
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.procs"]
