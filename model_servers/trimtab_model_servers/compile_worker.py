"""`python -m trimtab_model_servers.compile_worker < REQUEST`: compiles an operating point in a separate process.

Reads a `CompileRequest` as JSON and writes a `CompileResult` as one line of JSON. The compiler may take minutes and
cannot be interrupted within a process.
"""

import sys
from pathlib import Path

import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.registry import build
from trimtab_model_servers.families.vision_transformer import ServedTransformer
from trimtab_model_servers.transformer.compiled import compile_form
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.resource import Model


class CompileRequest(Model):
    """A compilation job."""

    spec: ModelSpec
    """Its first operating point is compiled for its maximum batch size and threads."""
    folder: Path


class CompileResult(Model):
    """Outcome of a compilation."""

    name: str = ""
    """Name of the compiled form; empty on failure."""
    failed: str = ""


def compile_once(request: CompileRequest) -> CompileResult:
    point, spec = request.spec.operating_points[0], request.spec
    torch.set_num_threads(spec.threads)
    try:
        network = build(spec).network
    except ModelError as error:
        return CompileResult(failed=str(error))
    if not isinstance(network, ServedTransformer):
        return CompileResult(failed=f"family {spec.family!r} has no compiled forms")
    ready = network.points[point.name]
    try:
        name = compile_form(network.transformer, ready.plan, ready.compute_dtype, spec.max_batch_size, request.folder)
    except ModelError as error:
        return CompileResult(failed=str(error))
    return CompileResult(name=name)


def main() -> None:
    print(compile_once(CompileRequest.model_validate_json(sys.stdin.read())).model_dump_json(by_alias=True))  # noqa: T201


if __name__ == "__main__":
    main()
