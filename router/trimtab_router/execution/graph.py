"""`Graph` and `GraphCursor`: position of one request in the pipeline's DAG.

A stage that reads a counted output runs on the rows of that output. Its results keep row order, which is the join. An
encoder stage runs on the images of chats, and each chat gets back the embeddings of its own images. A stage without a
required input is skipped and its outputs are absent. A stage without rows is skipped and its outputs are empty.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.model_spec import source_of
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import EMBEDDINGS_INPUT, IMAGES_INPUT, MESSAGES_INPUT, Stage, StageInput
from trimtab_pipelines.tensors import StageOutput
from trimtab_protocol import DTYPES
from trimtab_protocol.tensors import Array
from trimtab_router.execution import chat_images

MAX_CACHED_OUTPUTS = 256  # combinations of requested outputs, which clients choose: the cache is bounded


class ReadyStage(NamedTuple):
    """A stage that can run now, with its inputs. Every array has `rows` rows. Must not be modified."""

    stage: str
    rows: int
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class _Read:
    """Input of a stage: the name of a request tensor, or the full name of a stage output."""

    name: str
    of_request: bool
    key: str
    optional: bool = False
    padding: float | None = None
    padded: tuple[int, ...] = ()
    """Axes that are padded."""

    @classmethod
    def of(cls, name: str, source: str, *, optional: bool = False) -> "_Read":
        owner, tensor = split_reference(source)
        return cls(name, owner == REQUEST, tensor if owner == REQUEST else source, optional)


@dataclass(frozen=True, slots=True)
class _Node:
    """Stage in the graph: stages it depends on, inputs it reads, and outputs by key."""

    name: str
    upstream: frozenset[str]
    reads: tuple[_Read, ...]
    outputs_by_key: tuple[tuple[str, StageOutput], ...]
    encodes: bool = False


class Graph:
    """DAG of a pipeline, compiled once for all requests."""

    def __init__(self, spec: InferencePipelineSpec) -> None:
        self.stages: tuple[Stage, ...] = spec.ordered_stages
        self._spec = spec
        self._nodes = {stage.name: self._node(stage) for stage in self.stages}
        read = {split_reference(output.source)[0] for output in spec.outputs}
        self.streaming_stage = next(
            (stage.name for stage in self.stages if stage.generates and stage.name in read), None
        )
        """Stage that generates the response as a stream, None if responses are not streamed."""
        self.encoders = spec.encoders  # of each stage that reads images or embeddings, depending on the plan
        self.message_inputs = {
            stage.name: tensor
            for stage in self.stages
            if stage.generates
            for owner, tensor in [split_reference(read.source) for read in stage.inputs if read.name == MESSAGES_INPUT]
            if owner == REQUEST
        }
        """Request input that holds the chat messages, by generation stage."""
        self.outputs = {output.name: _Read.of(output.name, output.source) for output in spec.outputs}
        self.needed = lru_cache(MAX_CACHED_OUTPUTS)(self._needed)  # stages of these outputs, in topological order

    def _needed(self, outputs: tuple[str, ...]) -> tuple[_Node, ...]:
        needed: set[str] = set()
        waiting = {
            split_reference(read.key)[0] for read in map(self.outputs.__getitem__, outputs) if not read.of_request
        }
        while waiting:
            stage = waiting.pop()
            needed.add(stage)
            waiting |= self._nodes[stage].upstream - needed
        return tuple(node for name, node in self._nodes.items() if name in needed)

    def datatype_of(self, source: str) -> str:
        return source_of(self._spec, source).datatype

    def downstream(self, stage: str) -> tuple[str, ...]:
        return tuple(name for name, node in self._nodes.items() if stage in node.upstream)

    def _node(self, stage: Stage) -> _Node:
        reads = tuple(map(self._read, stage.inputs))
        upstream = frozenset(split_reference(read.key)[0] for read in reads if not read.of_request)
        outputs_by_key = tuple((f"{stage.name}.outputs.{output.name}", output) for output in stage.outputs)
        return _Node(stage.name, upstream, reads, outputs_by_key, stage.encodes)

    def _read(self, tensor: StageInput) -> _Read:
        read = _Read.of(tensor.name, tensor.source, optional=tensor.optional)
        if tensor.padding is None:
            return read
        open_axes = (axis for axis, size in enumerate(source_of(self._spec, tensor.source).shape, 1) if size == -1)
        return replace(read, padding=tensor.padding, padded=tuple(open_axes))


class GraphCursor:
    """Position of one request in the DAG."""

    __slots__ = ("_done", "_graph", "_requested_outputs", "_running", "_values", "_waiting", "inputs")

    def __init__(self, graph: Graph, inputs: Mapping[str, Array], requested_outputs: tuple[str, ...]) -> None:
        self._graph = graph
        self._requested_outputs = requested_outputs
        self._waiting: Sequence[_Node] = graph.needed(requested_outputs)
        self._running: dict[str, _Node] = {}
        self._done: set[str] = set()
        self._values: dict[str, Array | None] = {}
        self.inputs = inputs

    @property
    def finished(self) -> bool:
        return not self._running and not self._waiting

    @property
    def rows(self) -> int:
        return len(next(iter(self.inputs.values()), ()))

    @property
    def remaining_stages(self) -> list[str]:
        return [*self._running, *(stage.name for stage in self._waiting)]

    def available_inputs(self, stage: Stage) -> list[str]:
        """Inputs that a stage has or may get: all but request inputs that are absent."""
        reads = [_Read.of(tensor.name, tensor.source) for tensor in stage.inputs]
        return [read.name for read in reads if not read.of_request or read.key in self.inputs]

    def advance(self, idle: Container[str] = ()) -> list[ReadyStage]:
        """Stages that became ready. They count as running from now on. Stages in `idle` are skipped."""
        ready: list[ReadyStage] = []
        waiting: list[_Node] = []
        for node in self._waiting:  # in topological order, so that one pass handles skipped stages
            if not node.upstream <= self._done:
                waiting.append(node)
                continue
            inputs = {} if node.name in idle else self._gather(node)
            if node.encodes and inputs:
                inputs = chat_images.fan_out_images(inputs)
            rows = len(next(iter(inputs.values()))) if inputs else 0
            if rows:
                self._running[node.name] = node
                ready.append(ReadyStage(node.name, rows, inputs))
            else:
                self._skip(node, absent=not inputs)
        self._waiting = waiting
        return ready

    def complete(self, stage: str, outputs: Mapping[str, Array]) -> None:
        node = self._running.pop(stage)
        available_inputs = chat_images.join_embeddings(outputs, self.rows) if node.encodes else outputs
        for key, output in node.outputs_by_key:
            self._values[key] = available_inputs[output.name]
        self._done.add(stage)

    def chat_images(self, encoder: str) -> list[bytes]:
        """Images of a single-chat request that a stage encodes, in order. Empty for a request of several chats."""
        node = next(node for node in self._graph.needed(self._requested_outputs) if node.name == encoder)
        inputs = self._gather(node) if self.rows == 1 else {}
        return list(inputs[IMAGES_INPUT].reshape(-1)) if IMAGES_INPUT in inputs else []

    def start_early(self, encoder: str, references: Array) -> ReadyStage | None:
        """Start the stage that reads an encoder's images; `references` include images still being encoded."""
        for node in self._waiting:
            key = f"{encoder}.outputs.{EMBEDDINGS_INPUT}"
            if any(read.key == key for read in node.reads) and node.upstream - self._done == {encoder}:
                self._values[key] = references
                inputs = self._gather(node)
                self._waiting = [other for other in self._waiting if other is not node]
                self._running[node.name] = node
                return ReadyStage(node.name, len(references), inputs)
        return None

    def reopen(self, stage: str) -> set[str]:
        """Let a running stage and its encoders wait again, to encode its images once more. Returns their names."""
        node = self._running.pop(stage)
        encoders = {
            other.name for other in self._graph.needed(self._requested_outputs) if other.encodes
        } & node.upstream
        self._done -= encoders
        self._running = {name: other for name, other in self._running.items() if name not in encoders}
        reopened = {*encoders, stage, *(other.name for other in self._waiting)}
        self._waiting = [other for other in self._graph.needed(self._requested_outputs) if other.name in reopened]
        return {*encoders, stage}

    def outputs(self) -> dict[str, Array]:
        outputs: dict[str, Array] = {}
        for name in self._requested_outputs:
            read = self._graph.outputs[name]
            value = (self.inputs if read.of_request else self._values).get(read.key)
            if value is not None:
                outputs[name] = value
        return outputs

    def _gather(self, node: _Node) -> dict[str, Array]:
        inputs: dict[str, Array] = {}
        for read in node.reads:
            value = (self.inputs if read.of_request else self._values).get(read.key)
            if value is not None:
                inputs[read.name] = value if read.padding is None else pad(value, read.padding, read.padded)
            elif not read.optional:
                return {}
        return inputs

    def _skip(self, node: _Node, *, absent: bool) -> None:
        for key, output in node.outputs_by_key:
            self._values[key] = None if absent else empty_array(output)
        self._done.add(node.name)


def pad(rows: Array, value: float, axes: Container[int]) -> Array:
    """Rows [rows, …] with some axes filled up to a power of two, or one and a half times one."""
    missing = [(0, padded_size(size) - size if axis in axes else 0) for axis, size in enumerate(rows.shape)]
    return np.pad(rows, missing, constant_values=value)


def padded_size(size: int) -> int:
    power = 1 << max(size - 1, 0).bit_length()
    return power // 4 * 3 if 0 < size <= power // 4 * 3 else power


def empty_array(output: StageOutput) -> Array:
    return np.empty((0, *(max(size, 0) for size in output.shape)), DTYPES[output.datatype])
