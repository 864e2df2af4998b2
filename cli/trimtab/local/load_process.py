"""Process that sends the load of a run: sending and serving do not delay each other's event loop."""

import argparse
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from trimtab.options import SampledLoadArguments
from trimtab_loadtester.attack import AttackOptions, ClientProtocol, Progress, attack
from trimtab_loadtester.clients import OPEN, Access
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_loadtester.results import Results
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.processes.child_process import ChildProcess, StartError, command_options

STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class LoadOptions(SampledLoadArguments):
    """A load and how it is sent."""

    protocol: ClientProtocol = "REST"
    access: Access = OPEN

    def spec(self) -> LoadSpec:
        """Parse the load; raises LoadError."""
        if self.trace is not None:
            return LoadSpec.from_trace(self.trace, speed_up=self.speed_up, scale=self.scale)
        return LoadSpec.parse(self.load or "")

    @property
    def attack_options(self) -> AttackOptions:
        return AttackOptions(
            protocol=self.protocol,
            duration_seconds=self.duration_seconds,
            seed=self.seed,
            access=self.access,
            samples=self.samples,
        )


_OPTIONS, _PROGRESS = TypeAdapter(LoadOptions), TypeAdapter(Progress)


class LoadProcess:
    """A load being sent."""

    def __init__(self, process: ChildProcess, folder: Path) -> None:
        self._process, self._folder = process, folder

    @classmethod
    async def start(cls, pipeline_file: Path, address: str, options: LoadOptions, folder: Path) -> "LoadProcess":
        """Start sending to `address` (host:port); results and log are written into the folder."""
        options_json = _OPTIONS.dump_json(options).decode()
        arguments = command_options(pipeline=pipeline_file, address=address, out=folder, options=options_json)
        log = folder / "load.log"
        return cls(await ChildProcess.start("trimtab.local.load_process", arguments, log, "the load"), folder)

    async def progress(self) -> AsyncIterator[Progress]:
        """Yield the progress about twice a second, until the last response."""
        while line := await self._process.read_line():
            yield _PROGRESS.validate_json(line)

    async def results(self) -> Results:
        """Wait for the end and return the results; raises StartError if the process failed."""
        code = await self._process.wait()
        if code != 0:
            raise StartError(self._process.exit_message(code))
        return Results.load(self._folder)

    async def stop(self) -> None:
        """Stop the process if it runs; its results are lost."""
        await self._process.stop(STOP_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="trimtab.local.load_process", description=__doc__)
    parser.add_argument("--pipeline", type=Path, required=True)
    parser.add_argument("--address", required=True, help="HOST:PORT of the router")
    parser.add_argument("--options", required=True, help="LoadOptions as JSON")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    arguments = parser.parse_args()
    options = _OPTIONS.validate_json(arguments.options)
    pipeline = load_pipeline(arguments.pipeline)
    attack(pipeline, arguments.address, options.spec(), options.attack_options, _print_progress).save(arguments.out)
    return 0


def _print_progress(progress: Progress) -> None:
    sys.stdout.write(json.dumps(asdict(progress)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
