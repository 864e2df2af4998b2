"""How requests of many rows are split, as a person is shown it: `trimtab explain --rows`."""

import json

from tests.builders import a_pipeline, a_point_profile, a_profile
from tests.profiler.test_strategies import two_points
from trimtab.app import run
from trimtab.splitting import MOST_SHOWN, split_facts, split_tables
from trimtab_pipelines.documents import dump_yaml
from trimtab_profiler.profile import write_profiles


def test_a_person_is_shown_what_each_floor_costs_from_the_fastest_split_to_the_most_accurate():
    pipeline, profiles = two_points()
    (table,) = split_tables(pipeline, profiles, 64)
    accuracies, splits = (list(table.columns[place].cells) for place in (2, 4))
    (facts,) = split_facts(pipeline, profiles, 64)

    assert len(splits) == MOST_SHOWN < len(facts["strategies"])
    assert (str(splits[0]), str(splits[-1])) == ("64 half", "64 full")
    assert [float(str(one)) for one in accuracies] == sorted(float(str(one)) for one in accuracies)
    assert (facts["stage"], facts["rows"], facts["strategies"][0]["rows"]) == ("stage-0", 64, {"half": 64})
    assert len(split_tables(pipeline, profiles, 1)[0].rows) == 2


def test_where_there_is_one_point_each_nothing_is_shown():
    assert split_tables(a_pipeline(), {"stage-0": a_profile("stage-0", [a_point_profile()])}, 8) == []


def test_explain_shows_it_from_the_profiles_that_there_are(tmp_path, capsys):
    pipeline, profiles = two_points()
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(pipeline))
    written = write_profiles(profiles, tmp_path)
    asked = ["explain", str(tmp_path), "--load", "5", "--profiles", str(written), "--rows", "8"]

    assert run(asked) == 0
    assert "stage-0, a request of 8 rows" in " ".join(capsys.readouterr().out.split())
    assert run([*asked, "--json"]) == 0
    (splits,) = json.loads(capsys.readouterr().out)["splits"]
    assert splits["strategies"][-1]["rows"] == {"full": 8}
    assert run([*asked[:-1], "65"]) != 0
