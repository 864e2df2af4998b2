"""Walks one request through the DAG: which stage can run now, on which rows, and what the caller gets in the end.

A stage that reads a counted output runs on the rows that output fanned out into; their results keep row order, which
is the join. A stage whose needed input is absent is skipped and what it would have given is absent; a stage with no
rows is skipped and what it would have given is empty. Pure: tensors in, tensors out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.spec import InferencePipelineSpec, Stage
from trimtab_pipelines.tensors import StageOutput
from trimtab_protocol import DTYPES
from trimtab_protocol.tensors import Array


@dataclass(frozen=True, slots=True)
class Runnable:
    """A stage that can run now, with its inputs; every array has `rows` rows."""

    stage: str
    rows: int
    inputs: Mapping[str, Array]


class Graph:
    """A pipeline's DAG, compiled once for all requests."""

    def __init__(self, spec: InferencePipelineSpec) -> None:
        self.stages: tuple[Stage, ...] = spec.order
        self._spec = spec
        self.outputs = {output.name: output.source for output in spec.outputs}
        self._feeders = {
            stage.name: {split_reference(i.source)[0] for i in stage.inputs} - {REQUEST} for stage in self.stages
        }

    def needed_stages(self, outputs: Iterable[str]) -> frozenset[str]:
        """The stages that must run for these pipeline outputs."""
        needed: set[str] = set()
        waiting = {split_reference(self.outputs[name])[0] for name in outputs} - {REQUEST}
        while waiting:
            stage = waiting.pop()
            needed.add(stage)
            waiting |= self._feeders[stage] - needed
        return frozenset(needed)

    def datatype_of(self, source: str) -> str:
        """The datatype of what is written as `request.inputs.NAME` or `STAGE.outputs.NAME`."""
        owner, name = split_reference(source)
        tensors = self._spec.inputs if owner == REQUEST else self._spec.stage(owner).outputs
        return next(tensor.datatype for tensor in tensors if tensor.name == name)

    def following(self, stage: str) -> tuple[str, ...]:
        """The stages that read an output of this one."""
        return tuple(name for name, feeders in self._feeders.items() if stage in feeders)


class Walk:
    """Where one request stands in the DAG."""

    def __init__(self, graph: Graph, inputs: Mapping[str, Array], wanted: tuple[str, ...]) -> None:
        self._graph = graph
        self._wanted = wanted
        needed = graph.needed_stages(wanted)
        self._waiting = [stage for stage in graph.stages if stage.name in needed]
        self._running: dict[str, Stage] = {}
        self._values: dict[str, Array | None] = {}
        self.inputs = inputs

    @property
    def finished(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._waiting

    def advance(self) -> list[Runnable]:
        """The stages that became runnable; they count as running from now on."""
        runnable: list[Runnable] = []
        waiting: list[Stage] = []
        for stage in self._waiting:  # in topological order, so that one pass settles what is skipped
            if not all(self._settled(i.source) for i in stage.inputs):
                waiting.append(stage)
                continue
            inputs = self._gather(stage)
            rows = len(next(iter(inputs.values()))) if inputs else 0
            if rows:
                self._running[stage.name] = stage
                runnable.append(Runnable(stage.name, rows, inputs))
            else:
                self._skip(stage, absent=not inputs)
        self._waiting = waiting
        return runnable

    def complete(self, stage: str, outputs: Mapping[str, Array]) -> None:
        """Record what a running stage gave."""
        finished = self._running.pop(stage)
        for output in finished.outputs:
            self._values[f"{stage}.outputs.{output.name}"] = outputs[output.name]

    def answer(self) -> dict[str, Array]:
        """The wanted pipeline outputs that are not absent, in the order wanted."""
        values = {name: self._value(self._graph.outputs[name]) for name in self._wanted}
        return {name: value for name, value in values.items() if value is not None}

    def _settled(self, source: str) -> bool:
        return source in self._values or split_reference(source)[0] == REQUEST

    def _value(self, source: str) -> Array | None:
        owner, tensor = split_reference(source)
        return self.inputs.get(tensor) if owner == REQUEST else self._values[source]

    def _gather(self, stage: Stage) -> dict[str, Array]:
        """The stage's inputs; none at all where one that it needs is absent."""
        inputs: dict[str, Array] = {}
        for declared in stage.inputs:
            value = self._value(declared.source)
            if value is not None:
                inputs[declared.name] = value
            elif not declared.optional:
                return {}
        return inputs

    def _skip(self, stage: Stage, *, absent: bool) -> None:
        for output in stage.outputs:
            self._values[f"{stage.name}.outputs.{output.name}"] = None if absent else empty(output)


def empty(output: StageOutput) -> Array:
    """An array of no rows in the output's shape; free dimensions are 0."""
    return np.empty((0, *(max(size, 0) for size in output.shape)), DTYPES[output.datatype])
