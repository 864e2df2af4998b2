"""`python -m trimtab_model_servers.compile_worker < ORDER`: compile an operating point, in a process that may be ended.

Reads an `Order` as JSON; writes one line of JSON, the form's name or why there is none. A compiler cannot be stopped
where it runs beside other work, and takes minutes on a busy machine.
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
    """What is to be compiled."""

    spec: ModelSpec
    """Its first operating point is compiled, for its largest batch and its cores."""
    folder: Path
    """Where the form is written."""


class CompileResult(Model):
    """What came of it."""

    name: str = ""
    """Of the form; empty where there is none."""
    failed: str = ""
    """Why not."""


def compile_once(order: CompileRequest) -> CompileResult:
    """Compile a point of a vision transformer."""
    point, spec = order.spec.operating_points[0], order.spec
    torch.set_num_threads(spec.threads)
    try:
        network = build(spec).network
    except ModelError as error:
        return CompileResult(failed=str(error))
    if not isinstance(network, ServedTransformer):
        return CompileResult(failed=f"family {spec.family!r} has no compiled forms")
    ready = network.points[point.name]
    try:
        name = compile_form(network.transformer, ready.course, ready.half, spec.max_batch_size, order.folder)
    except ModelError as error:
        return CompileResult(failed=str(error))
    return CompileResult(name=name)


def main() -> None:
    """Answer one order."""
    print(compile_once(CompileRequest.model_validate_json(sys.stdin.read())).model_dump_json(by_alias=True))  # noqa: T201  (for who asked)


if __name__ == "__main__":
    main()
