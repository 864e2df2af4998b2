"""A loaded model, apart from any server: a request of the protocol in, an answer of the protocol out."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from watchfiles import awatch

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.device import placed
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.families.interfaces import CPU, Network, RegistersTasks
from trimtab_model_servers.families.registry import build
from trimtab_model_servers.model_metadata import Fact, Weights, metadata_facts, metadata_of
from trimtab_model_servers.request_validation import chosen_outputs, chosen_point, validate_rows
from trimtab_model_servers.tensors import DATATYPES, to_torch, to_wire, torch_dtype
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.tensors import StageOutput
from trimtab_protocol import InferRequest, InferResponse, Parameter, Tensor
from trimtab_protocol.extensions import COMPUTE_SECONDS, OPERATING_POINT, WAITED_SECONDS

WARM_UP_SECONDS = 0.5
TASKS_POLL_MILLISECONDS = 500
"""How often a folder of tasks is looked at, in case that no change of it is told."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostedModel:
    """One variant with its weights, ready to compute."""

    spec: ModelSpec
    network: Network
    weights: Weights
    further: Mapping[str, Fact] = field(default_factory=dict)
    """What only its family can tell of it."""
    device: torch.device = CPU
    """Where it computes."""

    async def infer(self, request: InferRequest, worker: BatchWorker) -> InferResponse:
        """Answer one request, its batch computed by `worker`.

        The answer's parameters are `operating_point`, `compute_seconds` and, where other batches came first,
        `waited_seconds`.

        Raises:
            RefusalError: 400 where the request does not fit the model, 429 or 503 from the worker, 500 where it fails.
        """
        rows = validate_rows(self.spec, request.inputs)
        point = chosen_point(self.spec, request.parameters)
        wanted = chosen_outputs(self.spec, request.requested_outputs)
        try:
            (outputs, seconds), waited = await worker.batch(partial(self.compute, request.inputs, point, wanted))
        except RefusalError:
            raise
        except Exception as error:  # a family from outside may raise anything: it is this batch's failure alone
            log.exception("model %s failed on a batch of %d rows", self.spec.name, rows)
            raise RefusalError(500, f"model {self.spec.name!r} failed on a batch of {rows} rows: {error}") from error
        parameters: dict[str, Parameter] = {OPERATING_POINT: point.name, COMPUTE_SECONDS: round(seconds, 9)}
        if waited:
            parameters[WAITED_SECONDS] = round(waited, 9)
        return InferResponse(model_name=self.spec.name, outputs=outputs, id=request.id, parameters=parameters)

    def compute(
        self, inputs: Sequence[Tensor], point: OperatingPoint, wanted: Sequence[str]
    ) -> tuple[tuple[Tensor, ...], float]:
        """Run one batch; return the wanted outputs and the seconds it took. Blocks."""
        started = perf_counter()
        with torch.inference_mode():
            outputs = self.network.infer({each.name: to_torch(each).to(self.device) for each in inputs}, point)
        return tuple(to_wire(name, outputs[name]) for name in wanted), perf_counter() - started

    def warm_up(self, budget_seconds: float = WARM_UP_SECONDS) -> None:
        """Run growing batches at every operating point, and check that the outputs are as declared.

        Batches double up to the largest, as far as the budget (shared by the points) is expected to last; at least
        the least one runs. Buffers and kernels are then there before the first request.

        Raises:
            ModelError: naming the output that is not as declared, or why the model cannot run.
        """
        share = budget_seconds / len(self.spec.operating_points)
        for point in self.spec.operating_points:
            began = perf_counter()
            for rows in _doubling(self.spec.max_batch_size):
                before = perf_counter()
                self._check_outputs(rows, self._trial(rows, point))
                now = perf_counter()
                if now - began + 2 * (now - before) > share:
                    break

    def metadata(self) -> dict[str, object]:
        """The protocol's model metadata, with our own facts under `parameters`."""
        return metadata_of(self.spec, self.facts())

    def facts(self) -> dict[str, Fact]:
        """What this model is, beyond its tensors."""
        own = self.network.facts() if isinstance(self.network, RegistersTasks) else {}
        return metadata_facts(self.spec, self.weights, {**self.further, **own})

    async def follow_tasks(self, worker: BatchWorker) -> None:
        """Take tasks as they come and go, for ever, between two batches; returns where there is nothing to follow.

        Beside a batch it would take turns with it at the interpreter's lock, for several times as long. Where the
        folder cannot be read, the tasks in force stay, and it is read again when it is looked at next.
        """
        folder, network, failure = self.spec.tasks_folder, self.network, ""
        if not folder or not isinstance(network, RegistersTasks):
            return
        async for _ in awatch(
            folder, recursive=False, step=20, debounce=100, rust_timeout=TASKS_POLL_MILLISECONDS, yield_on_timeout=True
        ):
            try:
                await worker.run(network.reread)
                failure = ""
            except Exception as error:  # whatever it is, tasks that come later are to be taken
                if failure != repr(error):  # told once, not at every look
                    log.exception("model %s cannot read its folder of tasks %s", self.spec.name, folder)
                failure = repr(error)

    def _trial(self, rows: int, point: OperatingPoint) -> dict[str, torch.Tensor]:
        carried = point.carried(self.spec.inputs)
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
            given = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
            raise ModelError(
                f"family {self.spec.family!r} cannot run on the stage's inputs ({given}): "
                f"{type(error).__name__}: {error}; give the stage the inputs this family reads"
            ) from error

    def _check_outputs(self, rows: int, outputs: dict[str, torch.Tensor]) -> None:
        for declared in self.spec.outputs:
            got = outputs.get(declared.name)
            if got is None:
                raise ModelError(
                    f"family {self.spec.family!r} gives no output {declared.name!r} as the stage declares; "
                    f"it gives: {', '.join(outputs)}"
                )
            if DATATYPES.get(got.dtype) != declared.datatype:
                raise ModelError(
                    f"family {self.spec.family!r} gives output {declared.name!r} as {DATATYPES.get(got.dtype)}, "
                    f"but the stage declares {declared.datatype}; correct outputs.{declared.name}.datatype"
                )
            self._check_shape(declared, rows, got)

    def _check_shape(self, declared: StageOutput, rows: int, got: torch.Tensor) -> None:
        if not declared.fits(got.shape) or (declared.counted_by is None and got.shape[0] != rows):
            raise ModelError(
                f"family {self.spec.family!r} gives output {declared.name!r} with shape {list(got.shape)} for "
                f"{rows} rows, but the stage declares {list(declared.shape)} for each; "
                f"correct outputs.{declared.name}.shape"
            )


def _doubling(largest: int) -> Iterator[int]:
    rows = 1
    while rows < largest:
        yield rows
        rows *= 2
    yield largest


def load_model(spec: ModelSpec) -> HostedModel:
    """Build, load and warm up a model on the calling thread, with the threads of its core allocation.

    Raises:
        ModelError: naming what is wrong with its family, its weights or its stage's tensors.
    """
    torch.set_num_threads(spec.threads)
    built = build(spec)
    device = placed(spec, built.network)
    facts = {**built.facts, "device": device.type} if spec.gpus else built.facts
    model = HostedModel(spec, built.network, built.weights, facts, device)
    model.warm_up()
    return model
