"""Walks one request through the DAG: which stage can run now, on which rows, and what the caller gets in the end.

A stage that reads a counted output runs on the rows that output fanned out into; their results keep row order, which
is the join. A stage that encodes runs on the images of chats, and each chat gets back what became of its own. A stage
whose needed input is absent is skipped and what it would have given is absent; a stage with no rows is skipped and what
it would have given is empty. Pure: tensors in, tensors out.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import EMBEDDINGS_INPUT, IMAGES_INPUT, MESSAGES_INPUT, Stage
from trimtab_pipelines.tensors import StageOutput
from trimtab_protocol import DTYPES
from trimtab_protocol.tensors import Array
from trimtab_router.request import image_fanout

MOST_CHOICES = 256
"""Choices of outputs whose stages are remembered: callers choose, so they must not fill the memory."""


@dataclass(slots=True)  # not frozen, which costs as much as all else about making one
class ReadyStage:
    """A stage that can run now, with its inputs; every array has `rows` rows. Nobody changes it."""

    stage: str
    rows: int
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class _Read:
    """An input of a stage: a tensor of the request by its own name, or what a stage gives by its whole one."""

    name: str
    of_request: bool
    key: str
    optional: bool = False

    @classmethod
    def of(cls, name: str, source: str, *, optional: bool = False) -> "_Read":
        owner, tensor = split_reference(source)
        return cls(name, owner == REQUEST, tensor if owner == REQUEST else source, optional)


@dataclass(frozen=True, slots=True)
class _Node:
    """A stage as the walk needs it: whom it waits for, what it reads, and what it gives by which key."""

    name: str
    feeders: frozenset[str]
    reads: tuple[_Read, ...]
    gives: tuple[tuple[str, StageOutput], ...]
    encodes: bool = False


class Graph:
    """A pipeline's DAG, compiled once for all requests."""

    def __init__(self, spec: InferencePipelineSpec) -> None:
        self.stages: tuple[Stage, ...] = spec.order
        self._spec = spec
        self._nodes = {stage.name: _node(stage) for stage in self.stages}
        read = {split_reference(output.source)[0] for output in spec.outputs}
        self.teller = next((stage.name for stage in self.stages if stage.generates and stage.name in read), None)
        """The stage that writes the answer piece by piece; None where answers come whole."""
        self.encoders = spec.encoders
        """Of each stage that reads images itself or pulls them, as the plan has it, the stage that encodes them."""
        self.messages = {
            stage.name: tensor
            for stage in self.stages
            if stage.generates
            for owner, tensor in [split_reference(each.source) for each in stage.inputs if each.name == MESSAGES_INPUT]
            if owner == REQUEST
        }
        """Of each stage that writes, the input of the request that has the messages of its chats."""
        self.outputs = {output.name: _Read.of(output.name, output.source) for output in spec.outputs}
        self.needed = lru_cache(MOST_CHOICES)(self._needed)
        """The stages that must run for these pipeline outputs, in topological order."""

    def _needed(self, outputs: tuple[str, ...]) -> tuple[_Node, ...]:
        needed: set[str] = set()
        waiting = {
            split_reference(read.key)[0] for read in map(self.outputs.__getitem__, outputs) if not read.of_request
        }
        while waiting:
            stage = waiting.pop()
            needed.add(stage)
            waiting |= self._nodes[stage].feeders - needed
        return tuple(node for name, node in self._nodes.items() if name in needed)

    def datatype_of(self, source: str) -> str:
        """The datatype of what is written as `request.inputs.NAME` or `STAGE.outputs.NAME`."""
        owner, name = split_reference(source)
        tensors = self._spec.inputs if owner == REQUEST else self._spec.stage(owner).outputs
        return next(tensor.datatype for tensor in tensors if tensor.name == name)

    def following(self, stage: str) -> tuple[str, ...]:
        """The stages that read an output of this one."""
        return tuple(name for name, node in self._nodes.items() if stage in node.feeders)


def _node(stage: Stage) -> _Node:
    reads = tuple(_Read.of(each.name, each.source, optional=each.optional) for each in stage.inputs)
    feeders = frozenset(split_reference(read.key)[0] for read in reads if not read.of_request)
    gives = tuple((f"{stage.name}.outputs.{output.name}", output) for output in stage.outputs)
    return _Node(stage.name, feeders, reads, gives, stage.encodes)


class GraphCursor:
    """Where one request stands in the DAG."""

    __slots__ = ("_graph", "_running", "_settled", "_values", "_waiting", "_wanted", "inputs")

    def __init__(self, graph: Graph, inputs: Mapping[str, Array], wanted: tuple[str, ...]) -> None:
        self._graph = graph
        self._wanted = wanted
        self._waiting: Sequence[_Node] = graph.needed(wanted)
        self._running: dict[str, _Node] = {}
        self._settled: set[str] = set()
        self._values: dict[str, Array | None] = {}
        self.inputs = inputs

    @property
    def finished(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._waiting

    @property
    def rows(self) -> int:
        """Of the request."""
        return len(next(iter(self.inputs.values()), ()))

    @property
    def ahead(self) -> list[str]:
        """The stages that run or wait."""
        return [*self._running, *(stage.name for stage in self._waiting)]

    def given(self, stage: Stage) -> list[str]:
        """The inputs that a stage has or may get: all but those of the request that are not there."""
        reads = [_Read.of(each.name, each.source) for each in stage.inputs]
        return [read.name for read in reads if not read.of_request or read.key in self.inputs]

    def advance(self, idle: Container[str] = ()) -> list[ReadyStage]:
        """The stages that became runnable; they count as running from now on. Those that are idle are skipped."""
        runnable: list[ReadyStage] = []
        waiting: list[_Node] = []
        for node in self._waiting:  # in topological order, so that one pass settles what is skipped
            if not node.feeders <= self._settled:
                waiting.append(node)
                continue
            inputs = {} if node.name in idle else self._gather(node)
            if node.encodes and inputs:
                inputs = image_fanout.fan_out_images(inputs)
            rows = len(next(iter(inputs.values()))) if inputs else 0
            if rows:
                self._running[node.name] = node
                runnable.append(ReadyStage(node.name, rows, inputs))
            else:
                self._skip(node, absent=not inputs)
        self._waiting = waiting
        return runnable

    def complete(self, stage: str, outputs: Mapping[str, Array]) -> None:
        """Record what a running stage gave."""
        node = self._running.pop(stage)
        given = image_fanout.join_embeddings(outputs, self.rows) if node.encodes else outputs
        for key, output in node.gives:
            self._values[key] = given[output.name]
        self._settled.add(stage)

    def shown(self, encoder: str) -> list[bytes]:
        """The images of the only chat of a request that a stage encodes, in order; none of a request of several."""
        node = next(each for each in self._graph.needed(self._wanted) if each.name == encoder)
        inputs = self._gather(node) if self.rows == 1 else {}
        return list(inputs[IMAGES_INPUT].reshape(-1)) if IMAGES_INPUT in inputs else []

    def begin(self, encoder: str, references: Array) -> ReadyStage | None:
        """The stage that pulls images, before all of them are encoded; it counts as running from now on.

        Args:
            encoder: the stage that encodes them.
            references: [rows], what can be told of each row's images now.
        """
        for node in self._waiting:
            key = f"{encoder}.outputs.{EMBEDDINGS_INPUT}"
            if any(read.key == key for read in node.reads) and node.feeders - self._settled == {encoder}:
                self._values[key] = references
                inputs = self._gather(node)
                self._waiting = [each for each in self._waiting if each is not node]
                self._running[node.name] = node
                return ReadyStage(node.name, len(references), inputs)
        return None

    def reopen(self, stage: str) -> set[str]:
        """Let a running stage wait again, for the images it was to pull to be encoded once more; returns who does."""
        node = self._running.pop(stage)
        encoders = {each.name for each in self._graph.needed(self._wanted) if each.encodes} & node.feeders
        self._settled -= encoders
        self._running = {name: each for name, each in self._running.items() if name not in encoders}
        again = {*encoders, stage, *(each.name for each in self._waiting)}
        self._waiting = [each for each in self._graph.needed(self._wanted) if each.name in again]
        return {*encoders, stage}

    def answer(self) -> dict[str, Array]:
        """The wanted pipeline outputs that are not absent, in the order wanted."""
        values = {name: self._value(self._graph.outputs[name]) for name in self._wanted}
        return {name: value for name, value in values.items() if value is not None}

    def _value(self, read: _Read) -> Array | None:
        return self.inputs.get(read.key) if read.of_request else self._values[read.key]

    def _gather(self, node: _Node) -> dict[str, Array]:
        """The stage's inputs; none at all where one that it needs is absent."""
        inputs: dict[str, Array] = {}
        for read in node.reads:
            value = self._value(read)
            if value is not None:
                inputs[read.name] = value
            elif not read.optional:
                return {}
        return inputs

    def _skip(self, node: _Node, *, absent: bool) -> None:
        for key, output in node.gives:
            self._values[key] = None if absent else empty(output)
        self._settled.add(node.name)


def empty(output: StageOutput) -> Array:
    """An array of no rows in the output's shape; free dimensions are 0."""
    return np.empty((0, *(max(size, 0) for size in output.shape)), DTYPES[output.datatype])
