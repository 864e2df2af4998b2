"""JSON schemas: equal to those that the models render, and strict about changed documents."""

from pathlib import Path

from trimtab_pipelines.rendering.generated import differing, write_or_check
from trimtab_pipelines.rendering.schema import SUFFIX, render

FOLDER = Path(__file__).parents[2] / "pipelines" / "schema"


def test_committed_schemas_are_current():
    assert differing(FOLDER, render(), SUFFIX) == []


def test_stale_schema_is_named(tmp_path, capsys):
    write_or_check([str(tmp_path)], render(), SUFFIX)
    (tmp_path / "pipelineplan.schema.json").write_text("{}")

    assert write_or_check([str(tmp_path), "--check"], render(), SUFFIX) == 1
    assert "pipelineplan.schema.json" in capsys.readouterr().err


def test_every_document_has_a_schema_in_camel_case():
    assert sorted(render()) == [
        "inferencepipeline.schema.json",
        "modelprofile.schema.json",
        "pipelineplan.schema.json",
    ]
    assert '"storageUri"' in render()["inferencepipeline.schema.json"]
