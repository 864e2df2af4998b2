"""Exit codes of commands that a signal ends."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import a_point_profile, a_profile
from tests.cli.pipelines import write_echo_pipeline
from tests.cli.test_supervisor import PATIENCE_SECONDS, assert_gone, up
from tests.loadtester.fake_pipeline import FakePipeline, a_pipeline, rest_server
from trimtab_pipelines.documents import dump_yaml
from trimtab_profiler.identity import this_machine

LOAD = ("--load", "constant:5", "--duration", "60")


@pytest.mark.parametrize(
    ("options", "number", "code"), [(LOAD, signal.SIGINT, 130), (LOAD, signal.SIGTERM, 143), ((), signal.SIGINT, 0)]
)
def test_interrupted_up_ends_all_processes(
    tmp_path: Path, options: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    with up(tmp_path, *options) as (process, below):
        assert len(below) >= 4
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == code, output
    assert code or "requests received" in output
    assert_gone(below)
    assert list((tmp_path / "t").iterdir()) == []


WAITS = """
import asyncio, sys
from trimtab.app import run_reporting_errors

async def waits():
    try:
        print("waits", flush=True)
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)

sys.exit(run_reporting_errors(lambda: asyncio.run(waits())))
"""


FAILS = """
import sys, time
from trimtab.app import run_reporting_errors

def waits():
    try:
        print("waits", flush=True)
        time.sleep(60)
    finally:
        raise OSError("a pipe is broken")

sys.exit(run_reporting_errors(waits))
"""


@pytest.mark.parametrize(
    ("script", "shell", "said"),
    [
        (FAILS, (), ("", "trimtab: terminated\n")),
        # Shells ignore SIGINT for a background job.
        (WAITS, ("sh", "-c", 'trap "" INT; exec "$@"', "sh"), ("cleaned up\n", "trimtab: terminated\n")),
    ],
    ids=["failure caused by the signal", "background job"],
)
def test_sigterm_exits_with_143(script: str, shell: tuple[str, ...], said: tuple[str, str]) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([*shell, sys.executable, "-c", script], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.terminate()
        output = process.communicate(timeout=PATIENCE_SECONDS)

    assert (process.returncode, output) == (143, said)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("verb", ["demo", "compare"])
def test_compare_exits_with_the_signal_code(tmp_path: Path, verb: str, number: signal.Signals, code: int) -> None:
    write_trusted_profile(tmp_path)
    command = [sys.executable, "-m", "trimtab", verb, str(write_echo_pipeline(tmp_path)), *LOAD, "-o", str(tmp_path)]
    command += ["--page-port", "0"] if verb == "demo" else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = []
        while "is ready" not in (line := process.stdout.readline()):
            said.append(line)
            assert line, "".join(said)
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == code, output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_loadtest_reports_and_exits_with_the_signal_code(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    fake = FakePipeline()
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(a_pipeline()))
    async with rest_server(fake) as address:
        arguments = ["-m", "trimtab", "loadtest", str(tmp_path), *LOAD, "--address", address.removeprefix("http://")]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=subprocess.PIPE)
        await fake.arrived.wait()
        process.send_signal(number)
        output, _ = await process.communicate()

    assert process.returncode == code
    assert json.loads(output.splitlines()[-1])["figures"]["received"] == fake.seen.total()


def write_trusted_profile(folder: Path) -> None:
    """Write profiles of this machine next to the echo pipeline, so that none is measured."""
    points = [a_point_profile(variant, 0.01, 0.002, cores=0.5) for variant in ("fast", "slow")]
    profiles = [a_profile(stage, points) for stage in ("first", "second")]
    here = [each.spec.model_copy(update={"hardware": this_machine(), "pipeline": "sample"}) for each in profiles]
    documents = [each.model_copy(update={"spec": spec}) for each, spec in zip(profiles, here, strict=True)]
    (folder / "profile.yaml").write_text(dump_yaml(*documents))
