"""`ModelRegistry`: the models of this process and the thread that computes for them.

There is one per process; `runtime` is loaded by MLServer once per model.
"""

import asyncio
from dataclasses import dataclass, field
from functools import cache

from trimtab_model_servers.batch_worker import BatchWorker, call_soon_threadsafe_if_open
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.server.interfaces import GeneratesText, ServedModel
from trimtab_protocol.http_client import Tls


@dataclass(slots=True)
class ModelRegistry:
    """Models by name, and load and run-time failures."""

    models: dict[str, ServedModel] = field(default_factory=dict)
    load_failures: dict[str, str] = field(default_factory=dict)
    worker: BatchWorker = field(default_factory=BatchWorker)
    has_data_port: bool = False
    expected: set[str] = field(default_factory=set)
    load_finished: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once every expected model is loaded or one has failed to load."""
    failed_models: dict[str, str] = field(default_factory=dict)
    """Reasons of models that failed for good after they were loaded."""
    model_failed: asyncio.Event = field(default_factory=asyncio.Event)
    tls: Tls = lambda: None
    terminating: bool = False
    """Whether the process is about to end; it still serves."""

    @property
    def ready(self) -> bool:
        """Whether the replica should receive requests: it serves and is not terminating."""
        return self.serving and not self.terminating

    @property
    def serving(self) -> bool:
        """Whether every expected model can answer (loading delays the others), and no drain has begun."""
        working = self.models.keys() - self.failed_models.keys()
        return bool(self.models) and self.expected <= working and not self.worker.draining

    def add_model(self, name: str, model: ServedModel) -> None:
        self.models[name] = model
        self.failed_models.pop(name, None)
        if isinstance(model, GeneratesText):
            loop = asyncio.get_running_loop()
            model.failure.add_done_callback(
                lambda failure: call_soon_threadsafe_if_open(loop, self._record_failure, name, model, failure.result())
            )
        if self.expected <= self.models.keys():
            self.load_finished.set()

    def record_load_failure(self, name: str, reason: str) -> None:
        self.load_failures[name] = reason
        self.load_finished.set()

    def _record_failure(self, name: str, model: ServedModel, reason: str) -> None:
        if self.models.get(name) is model:
            self.failed_models[name] = reason
            self.model_failed.set()

    def model(self, name: str) -> ServedModel:
        """The loaded model of a name; RefusalError 404 lists the models."""
        model = self.models.get(name)
        if model is None:
            names = ", ".join(sorted(self.models)) or "none yet"
            raise RefusalError(404, f"no model {name!r} here; loaded: {names}")
        return model


@cache
def process_registry() -> ModelRegistry:
    return ModelRegistry()
