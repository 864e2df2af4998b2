"""What this process serves: its models, and the one thread that computes for them.

One per process, and apart from `runtime`, which MLServer loads anew for every model.
"""

import asyncio
from dataclasses import dataclass, field

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.event_loops import call_soon_threadsafe_if_open
from trimtab_model_servers.interfaces import ReportsFailure, ServedModel
from trimtab_protocol.http_client import Tls


@dataclass(slots=True)
class ModelRegistry:
    """The models of a process by name, and why those that failed did."""

    models: dict[str, ServedModel] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    worker: BatchWorker = field(default_factory=BatchWorker)
    has_data_port: bool = False
    expected: set[str] = field(default_factory=set)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    broken: dict[str, str] = field(default_factory=dict)
    """Why models that answered once never will again, by name."""
    broke: asyncio.Event = field(default_factory=asyncio.Event)
    tls: Tls = lambda: None
    """What connections to other replicas are secured with."""
    leaving: bool = False
    """Whether this process is about to end; it still answers."""

    @property
    def ready(self) -> bool:
        """Whether callers are welcome: every model can answer, and the process is not about to end."""
        return self.answers and not self.leaving

    @property
    def answers(self) -> bool:
        """Whether every model that this process has begun to load can answer, and no drain has begun.

        Before the last one is loaded, loading would hold up the batches of those before it.
        """
        able = self.models.keys() - self.broken.keys()
        return bool(self.models) and self.expected <= able and not self.worker.draining

    def loaded(self, name: str, model: ServedModel) -> None:
        """Record a model that can answer; should it fail for good, it is broken from then on."""
        self.models[name] = model
        self.broken.pop(name, None)
        if isinstance(model, ReportsFailure):
            loop = asyncio.get_running_loop()
            model.failure.add_done_callback(
                lambda failure: call_soon_threadsafe_if_open(loop, self._break, name, model, failure.result())
            )
        if self.expected <= self.models.keys():
            self.settled.set()

    def failed(self, name: str, reason: str) -> None:
        """Record a model that cannot be loaded."""
        self.failures[name] = reason
        self.settled.set()

    def _break(self, name: str, model: ServedModel, reason: str) -> None:
        if self.models.get(name) is model:
            self.broken[name] = reason
            self.broke.set()

    def model(self, name: str) -> ServedModel:
        """The loaded model of that name; RefusalError 404 names those there are."""
        found = self.models.get(name)
        if found is None:
            known = ", ".join(sorted(self.models)) or "none yet"
            raise RefusalError(404, f"no model {name!r} here; loaded: {known}")
        return found


_hosts: list[ModelRegistry] = []


def host() -> ModelRegistry:
    """This process's host, made when first asked for."""
    if not _hosts:
        _hosts.append(ModelRegistry())
    return _hosts[0]
