"""`HostedModel`: a loaded model, independent of any server; imports torch only for a model that needs it."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from time import perf_counter

import numpy as np
from watchfiles import awatch

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.errors import InvalidRow, ModelError, RefusalError
from trimtab_model_servers.families.interfaces import HasExamples, MayBeCompiled, Network, RegistersTasks
from trimtab_model_servers.families.registry import CHAT_FAMILIES, NUMPY_FAMILIES, build, is_runtime
from trimtab_model_servers.model_protocol import (
    Fact,
    Weights,
    metadata_facts,
    select_operating_point,
    select_outputs,
    validate_rows,
)
from trimtab_model_servers.server.interfaces import ServedModel
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.tensors import StageOutput, TensorSpec
from trimtab_protocol import DTYPES, InferRequest, InferResponse, Parameter, Tensor
from trimtab_protocol.extensions import COMPUTE_SECONDS, OPERATING_POINT, WAITED_SECONDS
from trimtab_protocol.http_client import Tls
from trimtab_protocol.tensors import BYTES, DATATYPES, Array

WARM_UP_SECONDS, GPU_WARM_UP_SECONDS = 0.1, 0.5
TASKS_POLL_MILLISECONDS = 500
"""Interval at which a task folder is checked if no file event arrives."""
log = logging.getLogger(__name__)
EXAMPLE = b"example"
"""Value of a BYTES input while a model warms up, unless its family has one."""
Compute = Callable[[Mapping[str, Array], OperatingPoint, Collection[str] | None], Mapping[str, Array]]
"""Runs one batch on NumPy arrays; returns the named outputs, or all."""


def unsupported_gpu(spec: ModelSpec) -> ModelError:
    """The error of a variant whose family computes on no GPU, but which requests one."""
    return ModelError(f"family {spec.family!r} computes on cores alone; remove resources.gpu, which would stay idle")


def missing_gpu() -> ModelError:
    return ModelError("torch finds no GPU here, but resources.gpu requests one; remove it to compute on cores")


@dataclass(frozen=True, slots=True)
class HostedModel:
    """One variant with its weights, ready to compute."""

    spec: ModelSpec
    network: Network
    weights: Weights
    run: Compute
    family_facts: Mapping[str, Fact] = field(default_factory=dict)

    async def infer(self, request: InferRequest, worker: BatchWorker) -> InferResponse:
        """Answer one request; `worker` computes its batch.

        The response's parameters are `operating_point`, `compute_seconds` and, if the batch waited, `waited_seconds`.
        Raises RefusalError 400 if it is invalid, 429 or 503 from the worker, 500 if the model fails.
        """
        rows = validate_rows(self.spec, request.inputs)
        point = select_operating_point(self.spec, request.parameters)
        names = select_outputs(self.spec, request.requested_outputs)
        try:
            (outputs, seconds), waited = await worker.run_batch(partial(self.compute, request.inputs, point, names))
        except RefusalError:
            raise
        except Exception as error:  # a plugin may raise anything; only this batch fails
            log.exception("model %s failed on a batch of %d rows", self.spec.name, rows)
            raise RefusalError(500, f"model {self.spec.name!r} failed on a batch of {rows} rows: {error}") from error
        parameters: dict[str, Parameter] = {OPERATING_POINT: point.name, COMPUTE_SECONDS: round(seconds, 9)}
        if waited:
            parameters[WAITED_SECONDS] = round(waited, 9)
        return InferResponse(model_name=self.spec.name, outputs=outputs, id=request.id, parameters=parameters)

    def compute(
        self, inputs: Sequence[Tensor], point: OperatingPoint, names: Sequence[str]
    ) -> tuple[tuple[Tensor, ...], float]:
        """Run one batch; return the named outputs and the seconds it took. Blocks."""
        started = perf_counter()
        outputs = self.run({tensor.name: tensor.array for tensor in inputs}, point, names)
        return tuple(Tensor.of(name, outputs[name]) for name in names), perf_counter() - started

    def warm_up(self, budget_seconds: float = WARM_UP_SECONDS) -> None:
        """Run batches of growing size at every operating point, and check the outputs against the declared ones.

        The batch size doubles up to the maximum while the time budget, which the points share, is expected to suffice;
        at least one row runs, and two if the model is compiled. Buffers and kernels are thereby allocated before the
        first request. Raises ModelError.
        """
        least_rows = 2 if isinstance(self.network, MayBeCompiled) and self.network.compiled else 1
        point_seconds = budget_seconds / len(self.spec.operating_points)
        for point in self.spec.operating_points:
            began = perf_counter()
            maximum = max(self.spec.max_batch_size, least_rows)
            for rows in sorted({min(2**power, maximum) for power in range(maximum.bit_length() + 1)}):
                before = perf_counter()
                self._check_outputs(rows, self._trial(rows, point))
                now = perf_counter()
                if rows >= least_rows and now - began + 2 * (now - before) > point_seconds:
                    break

    def facts(self) -> dict[str, Fact]:
        task_facts = self.network.facts() if isinstance(self.network, RegistersTasks) else {}
        return metadata_facts(self.spec, self.weights, {**self.family_facts, **task_facts})

    async def watch_tasks(self, worker: BatchWorker) -> None:
        """Reload tasks when their folder changes, between two batches, for ever; returns at once without a task folder.

        Reloading during a batch would contend for the GIL and take several times as long. If the folder cannot be read,
        the active tasks stay, and it is read again at the next check.
        """
        folder, network, failure = self.spec.tasks_folder, self.network, ""
        if not folder or not isinstance(network, RegistersTasks):
            return
        async for _ in awatch(
            folder, recursive=False, step=20, debounce=100, rust_timeout=TASKS_POLL_MILLISECONDS, yield_on_timeout=True
        ):
            try:
                await worker.run(network.reload_tasks)
                failure = ""
            except Exception as error:  # later tasks must still be loaded
                if failure != repr(error):  # log it once
                    log.exception("model %s cannot read its folder of tasks %s", self.spec.name, folder)
                failure = repr(error)

    def _trial(self, rows: int, point: OperatingPoint) -> Mapping[str, Array]:
        carried = point.batch_inputs(self.spec.inputs)
        inputs = {
            expected.name: self._trial_input(rows, expected)
            for expected in self.spec.inputs
            if carried is None or expected.name in carried
        }
        try:
            return self.run(inputs, point, None)
        except InvalidRow as error:
            text = any(tensor.datatype == BYTES for tensor in self.spec.inputs)
            advice = "; give it a method `example(name)` that returns a valid value of each BYTES input" if text else ""
            raise ModelError(
                f"family {self.spec.family!r} refuses the example that it warms up with: {error}{advice}"
            ) from error
        except Exception as error:  # a plugin may raise anything
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
            raise ModelError(
                f"family {self.spec.family!r} cannot run on the stage's inputs ({shapes}): "
                f"{type(error).__name__}: {error}; the stage must have the inputs of this family"
            ) from error

    def _trial_input(self, rows: int, expected: TensorSpec) -> Array:
        any_size = 1 if expected.datatype == BYTES else getattr(self.network, "example_size", 1)
        shape, dtype = (rows, *(any_size if size == -1 else size for size in expected.shape)), DTYPES[expected.datatype]
        if expected.datatype != BYTES:
            return np.zeros(shape, dtype)
        network = self.network
        return np.full(shape, network.example(expected.name) if isinstance(network, HasExamples) else EXAMPLE, dtype)

    def _check_outputs(self, rows: int, outputs: Mapping[str, Array]) -> None:
        for declared in self.spec.outputs:
            array = outputs.get(declared.name)
            if array is None:
                raise ModelError(
                    f"family {self.spec.family!r} gives no output {declared.name!r} as the stage declares; "
                    f"it gives: {', '.join(outputs)}"
                )
            if DATATYPES.get(array.dtype) != declared.datatype:
                raise ModelError(
                    f"family {self.spec.family!r} gives output {declared.name!r} as {DATATYPES.get(array.dtype)}, "
                    f"but the stage declares {declared.datatype}; correct outputs.{declared.name}.datatype"
                )
            self._check_shape(declared, rows, array)

    def _check_shape(self, declared: StageOutput, rows: int, array: Array) -> None:
        if not declared.fits(array.shape) or (declared.counted_by is None and array.shape[0] != rows):
            raise ModelError(
                f"family {self.spec.family!r} gives output {declared.name!r} with shape {list(array.shape)} for "
                f"{rows} rows, but the stage declares {list(declared.shape)} for each; "
                f"correct outputs.{declared.name}.shape"
            )


def load_model(spec: ModelSpec) -> HostedModel:
    """Build, load and warm up a model with the threads of its core allocation; raises ModelError. Blocks."""
    if spec.family in NUMPY_FAMILIES or is_runtime(spec.family):
        model = _load_numpy_model(spec)
    else:
        model = import_module("trimtab_model_servers.server.torch_model").load(spec)
    model.warm_up(GPU_WARM_UP_SECONDS if spec.gpus else WARM_UP_SECONDS)
    return model


def _load_numpy_model(spec: ModelSpec) -> HostedModel:
    if spec.gpus and not is_runtime(spec.family):  # which places itself
        raise unsupported_gpu(spec)
    built = build(spec)
    return HostedModel(
        spec,
        built.network,
        built.weights,
        lambda inputs, point, _: built.network.infer(dict(inputs), point),
        built.facts,
    )


def load(spec: ModelSpec, worker: BatchWorker, tls: Tls = lambda: None) -> ServedModel:
    """As ``load_model``, or a chat model, for which ``worker`` will compute; ``tls`` secures its connections."""
    if spec.family not in CHAT_FAMILIES:
        return load_model(spec)
    loader = import_module("trimtab_model_servers.server.chat_loader")  # requires transformers, an optional dependency
    model: ServedModel = loader.load_chat(spec, worker, tls)
    return model
