"""`HostedModel`: a loaded model, independent of any server."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from time import perf_counter

import numpy as np
import torch
from watchfiles import awatch

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.families.interfaces import CPU, MovesToDevice, Network, RegistersTasks
from trimtab_model_servers.families.registry import CHAT_FAMILIES, build
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
from trimtab_pipelines.tensors import StageOutput
from trimtab_protocol import InferRequest, InferResponse, Parameter, Tensor
from trimtab_protocol.extensions import COMPUTE_SECONDS, OPERATING_POINT, WAITED_SECONDS
from trimtab_protocol.http_client import Tls

WARM_UP_SECONDS = 0.5
TASKS_POLL_MILLISECONDS = 500
"""Interval at which a task folder is checked if no file event arrives."""
GPU = torch.device("cuda")
TORCH_DTYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
DATATYPES = {dtype: datatype for datatype, dtype in TORCH_DTYPES.items()}
log = logging.getLogger(__name__)


def torch_dtype(tensor: str, datatype: str) -> torch.dtype:
    dtype = TORCH_DTYPES.get(datatype)
    if dtype is None:
        raise ModelError(f"tensor {tensor!r}: torch has no {datatype}; use one of {', '.join(TORCH_DTYPES)}")
    return dtype


def to_torch(tensor: Tensor) -> torch.Tensor:
    """View a protocol tensor as a torch tensor; copies only read-only or unaligned arrays."""
    array = tensor.array
    if not (array.flags.writeable and array.flags.aligned):
        array = array.copy()
    return torch.from_numpy(array)


def to_wire(name: str, tensor: torch.Tensor) -> Tensor:
    """View a torch tensor as a protocol tensor; copies only if it is not contiguous or not in main memory."""
    array = np.ascontiguousarray(tensor.detach().cpu().numpy()) if tensor.dim() else tensor.numpy()
    return Tensor(name, DATATYPES[tensor.dtype], array)


def unusable_gpu(spec: ModelSpec, *, supported: bool) -> ModelError:
    """The error of a variant that requests a GPU which torch does not find, or which its family does not support."""
    if not supported:
        return ModelError(
            f"family {spec.family!r} computes on cores alone; remove resources.gpu, which would stay idle"
        )
    return ModelError("torch finds no GPU here, but resources.gpu requests one; remove it to compute on cores")


def move_to_device(
    spec: ModelSpec, network: Network, gpu_available: Callable[[], bool] = torch.cuda.is_available
) -> torch.device:
    """Move a network to its device, and return it; ModelError if a requested GPU cannot be used."""
    if not spec.gpus:
        return CPU
    if not isinstance(network, MovesToDevice) or not gpu_available():
        raise unusable_gpu(spec, supported=isinstance(network, MovesToDevice))
    network.move_to(GPU)
    return GPU


@dataclass(frozen=True, slots=True)
class HostedModel:
    """One variant with its weights, ready to compute."""

    spec: ModelSpec
    network: Network
    weights: Weights
    family_facts: Mapping[str, Fact] = field(default_factory=dict)
    device: torch.device = CPU

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
        with torch.inference_mode():
            outputs = self.network.infer({tensor.name: to_torch(tensor).to(self.device) for tensor in inputs}, point)
        return tuple(to_wire(name, outputs[name]) for name in names), perf_counter() - started

    def warm_up(self, budget_seconds: float = WARM_UP_SECONDS) -> None:
        """Run batches of growing size at every operating point, and check the outputs against the declared ones.

        The batch size doubles up to the maximum while the time budget, which the points share, is expected to suffice;
        at least one row runs. Buffers and kernels are thereby allocated before the first request. Raises ModelError.
        """
        point_seconds = budget_seconds / len(self.spec.operating_points)
        for point in self.spec.operating_points:
            began = perf_counter()
            maximum = self.spec.max_batch_size
            for rows in sorted({min(2**power, maximum) for power in range(maximum.bit_length() + 1)}):
                before = perf_counter()
                self._check_outputs(rows, self._trial(rows, point))
                now = perf_counter()
                if now - began + 2 * (now - before) > point_seconds:
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

    def _trial(self, rows: int, point: OperatingPoint) -> dict[str, torch.Tensor]:
        carried = point.batch_inputs(self.spec.inputs)
        inputs = {
            expected.name: torch.zeros(
                (rows, *(1 if size == -1 else size for size in expected.shape)),
                dtype=torch_dtype(expected.name, expected.datatype),
                device=self.device,
            )
            for expected in self.spec.inputs
            if carried is None or expected.name in carried
        }
        try:
            with torch.inference_mode():
                return self.network.infer(inputs, point)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
            raise ModelError(
                f"family {self.spec.family!r} cannot run on the stage's inputs ({shapes}): "
                f"{type(error).__name__}: {error}; the stage must have the inputs of this family"
            ) from error

    def _check_outputs(self, rows: int, outputs: dict[str, torch.Tensor]) -> None:
        for declared in self.spec.outputs:
            tensor = outputs.get(declared.name)
            if tensor is None:
                raise ModelError(
                    f"family {self.spec.family!r} gives no output {declared.name!r} as the stage declares; "
                    f"it gives: {', '.join(outputs)}"
                )
            if DATATYPES.get(tensor.dtype) != declared.datatype:
                raise ModelError(
                    f"family {self.spec.family!r} gives output {declared.name!r} as {DATATYPES.get(tensor.dtype)}, "
                    f"but the stage declares {declared.datatype}; correct outputs.{declared.name}.datatype"
                )
            self._check_shape(declared, rows, tensor)

    def _check_shape(self, declared: StageOutput, rows: int, tensor: torch.Tensor) -> None:
        if not declared.fits(tensor.shape) or (declared.counted_by is None and tensor.shape[0] != rows):
            raise ModelError(
                f"family {self.spec.family!r} gives output {declared.name!r} with shape {list(tensor.shape)} for "
                f"{rows} rows, but the stage declares {list(declared.shape)} for each; "
                f"correct outputs.{declared.name}.shape"
            )


def load_model(spec: ModelSpec) -> HostedModel:
    """Build, load and warm up a model with the threads of its core allocation; raises ModelError. Blocks."""
    torch.set_num_threads(spec.threads)
    built = build(spec)
    device = move_to_device(spec, built.network)
    facts = {**built.facts, "device": device.type} if spec.gpus else built.facts
    model = HostedModel(spec, built.network, built.weights, facts, device)
    model.warm_up()
    return model


def load(spec: ModelSpec, worker: BatchWorker, tls: Tls = lambda: None) -> ServedModel:
    """As ``load_model``, or a chat model, for which ``worker`` will compute; ``tls`` secures its connections."""
    if spec.family not in CHAT_FAMILIES:
        return load_model(spec)
    loader = import_module("trimtab_model_servers.server.chat_loader")  # requires transformers, an optional dependency
    model: ServedModel = loader.load_chat(spec, worker, tls)
    return model
