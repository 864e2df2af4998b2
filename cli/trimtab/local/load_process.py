"""The load of a run, in a process of its own, so that sending and serving do not delay each other's event loop.

`LoadOptions` is what is asked; `LoadProcess` the shell around the process, which tells its progress line by line.
"""

import argparse
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from trimtab_loadtester.attack import AttackOptions, Progress, WireName, attack
from trimtab_loadtester.clients import OPEN, Access
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_loadtester.results import Results
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.processes.child_process import ChildProcess, StartError

STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """A load as the command line asks for it: written out, or a per-second trace in a file."""

    load: str | None = None
    trace: Path | None = None
    speed_up: float = 1.0
    scale: float = 1.0
    duration_seconds: float | None = None
    seed: int = 0
    wire: WireName = "REST"
    access: Access = OPEN
    samples: str | None = None

    def spec(self) -> LoadSpec:
        """Read it; raises LoadError (a ValueError) saying what would be right."""
        if self.trace is not None:
            return LoadSpec.from_trace(self.trace, speed_up=self.speed_up, scale=self.scale)
        return LoadSpec.parse(self.load or "")

    @property
    def options(self) -> AttackOptions:
        """How it is sent."""
        return AttackOptions(
            wire=self.wire,
            duration_seconds=self.duration_seconds,
            seed=self.seed,
            access=self.access,
            samples=self.samples,
        )


_ORDER, _PROGRESS = TypeAdapter(LoadOptions), TypeAdapter(Progress)


class LoadProcess:
    """A load that is being sent."""

    def __init__(self, module: ChildProcess, folder: Path) -> None:
        self._module, self._folder = module, folder

    @classmethod
    async def start(cls, pipeline_file: Path, address: str, order: LoadOptions, folder: Path) -> "LoadProcess":
        """Start sending to `address` (host:port); results and log go into the folder."""
        arguments = ["--pipeline", str(pipeline_file), "--address", address, "--out", str(folder)]
        arguments += ["--order", _ORDER.dump_json(order).decode()]
        return cls(
            await ChildProcess.start("trimtab.local.load_process", arguments, folder / "load.log", "the load"), folder
        )

    async def progress(self) -> AsyncIterator[Progress]:
        """Tell how far it is, about twice a second, until it has its last answer."""
        while line := await self._module.line():
            yield _PROGRESS.validate_json(line)

    async def results(self) -> Results:
        """Wait for the end and return what happened; raises StartError where it failed."""
        code = await self._module.wait()
        if code != 0:
            raise StartError(self._module.exit_message(code))
        return Results.load(self._folder)

    async def stop(self) -> None:
        """End it where it still runs; its results are lost then."""
        await self._module.stop(STOP_SECONDS)


def main() -> int:
    """Send a load and write its results."""
    parser = argparse.ArgumentParser(prog="trimtab.local.load_process", description=__doc__)
    parser.add_argument("--pipeline", type=Path, required=True)
    parser.add_argument("--address", required=True, help="host:port of the router")
    parser.add_argument("--order", required=True, help="a LoadOptions as JSON")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    given = parser.parse_args()
    order = _ORDER.validate_json(given.order)
    pipeline = load_pipeline(given.pipeline)
    attack(pipeline, given.address, order.spec(), order.options, _tell).save(given.out)
    return 0


def _tell(progress: Progress) -> None:
    sys.stdout.write(json.dumps(asdict(progress)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
