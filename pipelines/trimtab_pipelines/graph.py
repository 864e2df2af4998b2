"""Checks of the DAG a pipeline's stages form: references, cycles, rows, fan-out. Pure; errors name the field."""

from collections.abc import Mapping, Sequence

from trimtab_pipelines.stages import PipelineOutput, Stage
from trimtab_pipelines.tensors import RequestInput, StageOutput

REQUEST = "request"


def split_reference(reference: str) -> tuple[str, str]:
    """Split `STAGE.outputs.TENSOR` into stage and tensor; the request's own tensors come from `request`."""
    owner, _, tensor = reference.split(".", 2)
    return owner, tensor


def check_references(
    inputs: Sequence[RequestInput], outputs: Sequence[PipelineOutput], stages: Sequence[Stage]
) -> None:
    """Check that every `from` names a tensor that exists, and that none could be of a stage and of the caller."""
    if any(stage.name == REQUEST for stage in stages):
        raise ValueError(f"stages: {REQUEST!r} stands for the caller and names no stage; call the stage something else")
    known = {f"{REQUEST}.inputs.{tensor.name}" for tensor in inputs}
    known |= {f"{stage.name}.outputs.{tensor.name}" for stage in stages for tensor in stage.outputs}
    readers = [(f"stage {stage.name}: inputs.{i.name}", i.source) for stage in stages for i in stage.inputs]
    readers += [(f"outputs.{output.name}", output.source) for output in outputs]
    for where, source in readers:
        if source not in known:
            raise ValueError(f"{where}.from {source!r} names no tensor; there are: {', '.join(sorted(known))}")


def predecessors(stage: Stage) -> set[str]:
    """The names of the stages that a stage reads."""
    return {split_reference(read.source)[0] for read in stage.inputs} - {REQUEST}


def topological_order(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages so that each comes after those it reads; raise ValueError that shows a cycle."""
    waiting = {stage.name: predecessors(stage) for stage in stages}
    by_name = {stage.name: stage for stage in stages}
    order: list[Stage] = []
    while waiting:
        ready = [name for name, needs in waiting.items() if not needs & waiting.keys()]
        if not ready:
            raise ValueError(f"stages: {_cycle(waiting)} is a cycle; a pipeline must be acyclic")
        order += [by_name[name] for name in ready]
        for name in ready:
            del waiting[name]
    return tuple(order)


def _cycle(waiting: Mapping[str, set[str]]) -> str:
    """Walk from stage to stage until one repeats."""
    path = [next(iter(waiting))]
    while True:
        following = next(name for name in sorted(waiting[path[-1]]) if name in waiting)
        if following in path:
            return " → ".join(reversed([*path[path.index(following) :], following]))
        path.append(following)


def row_domains(inputs: Sequence[RequestInput], order: Sequence[Stage]) -> dict[str, str]:
    """Tell for each stage whose rows it runs on; raise ValueError when its inputs disagree."""
    domain_of: dict[str, str] = {f"{REQUEST}.inputs.{tensor.name}": REQUEST for tensor in inputs}
    domains: dict[str, str] = {}
    for stage in order:
        found = {domain_of[i.source]: f"{i.name} (from {i.source})" for i in stage.inputs}
        if len(found) > 1:
            raise ValueError(
                f"stage {stage.name}: inputs {' and '.join(found.values())} have different rows; "
                "all inputs of a stage must come from the request or from one fan-out"
            )
        domains[stage.name] = next(iter(found))
        for output in stage.outputs:
            reference = f"{stage.name}.outputs.{output.name}"
            domain_of[reference] = reference_domain(stage.name, output, domains[stage.name])
    return domains


def reference_domain(stage: str, output: StageOutput, domain: str) -> str:
    """Tell the rows an output has: those of its stage, or new ones shared by all outputs with the same count."""
    return domain if output.counted_by is None else f"{stage}.outputs.{output.counted_by}"


def expected_rows(order: Sequence[Stage], domains: Mapping[str, str]) -> dict[str, float]:
    """Multiply the fan-outs on the way to each stage; one that encodes has a row for each image of a chat."""
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
