"""Validation of the DAG that a pipeline's stages form: references, cycles, rows and fan-out."""

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from trimtab_pipelines.stages import PipelineOutput, Stage
from trimtab_pipelines.tensors import RequestInput, StageOutput, TensorSpec

REQUEST = "request"


def split_reference(reference: str) -> tuple[str, str]:
    """Split `STAGE.outputs.TENSOR` into stage and tensor; request inputs have the owner `request`."""
    owner, _, tensor = reference.split(".", 2)
    return owner, tensor


def check_references(
    inputs: Sequence[RequestInput], outputs: Sequence[PipelineOutput], stages: Sequence[Stage]
) -> None:
    """Require that every `from` names an existing tensor, and that no stage is named `request`."""
    if any(stage.name == REQUEST for stage in stages):
        raise ValueError(f"stages: the name {REQUEST!r} is reserved for the request; rename the stage")
    known: dict[str, TensorSpec] = {f"{REQUEST}.inputs.{tensor.name}": tensor for tensor in inputs}
    known |= {f"{stage.name}.outputs.{tensor.name}": tensor for stage in stages for tensor in stage.outputs}
    readers = [(f"stage {stage.name}: inputs.{i.name}", i.source) for stage in stages for i in stage.inputs]
    readers += [(f"outputs.{output.name}", output.source) for output in outputs]
    for where, source in readers:
        if source not in known:
            raise ValueError(f"{where}.from {source!r} is unknown; known tensors: {', '.join(sorted(known))}")
    for stage in stages:
        for read in stage.inputs:
            if read.padding is not None and not known[read.source].can_hold(read.padding):
                raise ValueError(
                    f"stage {stage.name}: inputs.{read.name}.padding {read.padding:g} fits no {read.source} of "
                    f"{known[read.source].datatype} {[*known[read.source].shape]}; it must be a number of that "
                    "datatype, and a dimension must have any size (-1)"
                )


def predecessors(stage: Stage) -> set[str]:
    return {split_reference(read.source)[0] for read in stage.inputs} - {REQUEST}


def topological_order(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Stages in topological order; ValueError shows a cycle."""
    by_name = {stage.name: stage for stage in stages}
    sorter = TopologicalSorter({stage.name: sorted(predecessors(stage)) for stage in stages})
    try:
        return tuple(by_name[name] for name in sorter.static_order())
    except CycleError as error:
        raise ValueError(f"stages: {' → '.join(error.args[1])} is a cycle; a pipeline must be acyclic") from None


def row_domains(inputs: Sequence[RequestInput], order: Sequence[Stage]) -> dict[str, str]:
    """For each stage, the tensor whose rows it runs on; ValueError if its inputs disagree."""
    domain_of: dict[str, str] = {f"{REQUEST}.inputs.{tensor.name}": REQUEST for tensor in inputs}
    domains: dict[str, str] = {}
    for stage in order:
        sources = {domain_of[i.source]: f"{i.name} (from {i.source})" for i in stage.inputs}
        if len(sources) > 1:
            raise ValueError(
                f"stage {stage.name}: inputs {' and '.join(sources.values())} have different rows; "
                "all inputs of a stage must come from the request or from one fan-out"
            )
        domains[stage.name] = next(iter(sources))
        for output in stage.outputs:
            reference = f"{stage.name}.outputs.{output.name}"
            domain_of[reference] = reference_domain(stage.name, output, domains[stage.name])
    return domains


def reference_domain(stage: str, output: StageOutput, domain: str) -> str:
    """Domain of an output: its stage's, or a new one shared by all outputs with the same count."""
    return domain if output.counted_by is None else f"{stage}.outputs.{output.counted_by}"


def expected_rows(order: Sequence[Stage], domains: Mapping[str, str]) -> dict[str, float]:
    """Expected rows of each stage per request row: the product of fan-outs; encoders have one row per image."""
    rows_of_domain = {REQUEST: 1.0}
    rows: dict[str, float] = {}
    for stage in order:
        rows[stage.name] = rows_of_domain[domains[stage.name]] * (
            stage.outputs[0].expected_rows if stage.encodes else 1
        )
        for output in stage.outputs:
            if output.counted_by is not None:
                domain = reference_domain(stage.name, output, domains[stage.name])
                rows_of_domain[domain] = rows[stage.name] * output.expected_rows
    return rows
