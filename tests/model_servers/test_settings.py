import json
import subprocess
import sys

import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from trimtab_model_servers.server.settings import write_model_folder
from trimtab_pipelines.model_spec import ModelSpec


def written(pipeline, folder, stage="first", cores=1.0):
    """MLServer's settings of the variant `small` of a stage."""
    write_model_folder(pipeline, folder, stage, ["small"], folder / "out", cores=cores)
    return json.loads((folder / "out" / "small" / "model-settings.json").read_text())


def test_stage_reads_outputs_of_the_previous_stage(tmp_path):
    first = a_stage("first", outputs=[{"name": "crops", "datatype": "UINT8", "shape": [1, 28, 28]}])
    second = a_stage("second", inputs=[{"name": "crop", "from": "first.outputs.crops", "optional": True}])
    settings = written(a_pipeline([first, second]), tmp_path, "second", cores=0.5)
    assert settings["inputs"] == [{"name": "crop", "datatype": "UINT8", "shape": [-1, 1, 28, 28]}]
    spec = ModelSpec.model_validate(settings["parameters"]["extra"])
    assert spec.inputs[0].optional
    assert spec.threads == 1


@pytest.mark.parametrize(
    ("uri", "resolved"),
    [
        ("weights/a.safetensors", "{folder}/weights/a.safetensors"),
        ("/abs/a.safetensors", "/abs/a.safetensors"),
        ("s3://bucket/a.safetensors", "s3://bucket/a.safetensors"),
    ],
)
def test_relative_weights_are_resolved_from_the_pipeline(tmp_path, uri, resolved):
    settings = written(a_pipeline([a_stage(variants=[a_variant(storageUri=uri)])]), tmp_path)
    assert settings["parameters"]["uri"] == resolved.format(folder=tmp_path)


@pytest.mark.parametrize(("cores", "threads"), [(0.25, 1), (1, 1), (1.9, 1), (2, 2), (4, 4)])
def test_threads_are_the_whole_cores(tmp_path, cores, threads):
    settings = written(a_pipeline(), tmp_path, "stage-0", cores)
    assert ModelSpec.model_validate(settings["parameters"]["extra"]).threads == threads


def test_unknown_variant_lists_the_variants(tmp_path):
    with pytest.raises(KeyError, match="no variant 'huge'; it has: small"):
        write_model_folder(a_pipeline(), tmp_path, "stage-0", ["huge"], tmp_path, cores=1)


PRELOAD = """
from tests.builders import a_pipeline
from trimtab_model_servers.families.registry import modules_to_preload
print(*modules_to_preload(a_pipeline()))
"""
PRELOADED = "trimtab_model_servers.server.replica trimtab_model_servers.families.echo\n"


@pytest.mark.parametrize(
    ("code", "output"), [("import trimtab_model_servers.server.settings", ""), (PRELOAD, PRELOADED)]
)
def test_process_that_starts_replicas_needs_no_torch(code, output):
    code += "\nimport sys; print({'torch', 'mlserver'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == output + "set()\n"
