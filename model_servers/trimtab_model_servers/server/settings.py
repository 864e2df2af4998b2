"""The model folder of a replica, as MLServer's model repository reads it.

The `ModelSpec` is in `parameters.extra` of MLServer's model-settings.json. The process that starts replicas writes the
folder, so this module does not import torch.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from trimtab_model_servers.model_protocol import PLATFORM, tensor_metadata
from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.model_spec import MAX_BODY_BYTES, ModelSpec, model_spec
from trimtab_pipelines.spec import InferencePipeline

RUNTIME = "trimtab_model_servers.server.runtime.TorchRuntime"


def write_model_folder(
    pipeline: InferencePipeline,
    pipeline_folder: Path,
    stage: str,
    variants: Sequence[str],
    folder: Path,
    cores: float,
    *,
    tasks: Path | None = None,
) -> None:
    """Write settings.json and a VARIANT/model-settings.json for each variant that a replica serves.

    ``pipeline_folder`` is the base of relative storage URIs. ``tasks`` has a task folder for each variant, created if
    it is missing; None for no task folders. Raises KeyError for an unknown stage or variant.
    """
    owner = pipeline.spec.stage(stage)
    specs = [model_spec(pipeline, pipeline_folder, owner, owner.variant(name), cores) for name in variants]
    write_models([spec if tasks is None else _with_tasks_folder(spec, tasks / spec.name) for spec in specs], folder)


def _with_tasks_folder(spec: ModelSpec, tasks: Path) -> ModelSpec:
    tasks.mkdir(parents=True, exist_ok=True)
    return spec.replace(tasks_folder=str(tasks.resolve()))


def write_models(specs: Sequence[ModelSpec], folder: Path) -> None:
    for spec in specs:
        _write(folder / spec.name / "model-settings.json", model_settings(spec))
    _write(folder / "settings.json", server_settings())


def model_settings(spec: ModelSpec) -> dict[str, object]:
    """MLServer's settings of one model. `max_batch_size` stays 0, because it would enable MLServer's own batcher."""
    return {
        "name": spec.name,
        "implementation": RUNTIME,
        "platform": PLATFORM,
        "inputs": [tensor_metadata(tensor) for tensor in spec.inputs],
        "outputs": [tensor_metadata(tensor) for tensor in spec.outputs],
        "parameters": {
            "uri": spec.storage_uri,
            "extra": spec.model_dump(mode="json", by_alias=True, exclude_none=True),
        },
    }


def server_settings() -> dict[str, object]:
    """MLServer's settings of the process: no worker processes and no metrics port."""
    return {
        "debug": False,
        "server_name": "trimtab",
        "parallel_workers": 0,
        "metrics_endpoint": None,
        "gzip_enabled": False,
        "grpc_max_message_length": MAX_BODY_BYTES + 2**20,
    }


def _write(path: Path, content: object) -> None:
    write_atomically(path, json.dumps(content, indent=1) + "\n")
