"""Conventions of the command line: fast help, JSON output, equal syntax, one-line errors."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import a_pipeline, a_point_profile, a_profile
from tests.cli.pipelines import write_echo_pipeline
from tests.cli.runs import a_run
from tests.cli.test_command_line import Captured, a_profile_file, said
from trimtab import app, run_record
from trimtab.__main__ import main
from trimtab.app import run
from trimtab.commands import status
from trimtab.local.counters import Counters
from trimtab_pipelines.documents import dump_yaml, load_pipeline
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.router_state import RecentRequests, RouterState
from trimtab_pipelines.spec import InferencePipeline

HEAVY = {"numpy", "torch", "grpc", "aiohttp", "httpx", "plotly", "uvloop", "trimtab_adapter", "trimtab_loadtester"}


@pytest.mark.parametrize("verb", app.COMMANDS)
def test_command_list_matches_the_commands_help(verb: str) -> None:
    help_text = inspect.getdoc(app.command_module(verb).command)
    assert help_text is not None
    assert help_text.partition("\n\n")[0].replace("\n", " ") == app.COMMANDS[verb]


@pytest.mark.parametrize("arguments", [["--version"], ["-h"], ["status", "--port", "9"]])
def test_frequent_commands_import_little(arguments: list[str]) -> None:
    """Imports are checked rather than times, which other load affects. `status` needs an HTTP client."""
    code = f"import sys; from trimtab.app import run; run({arguments!r}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = HEAVY & set(done.stderr.split())
    assert loaded <= ({"aiohttp"} if "status" in arguments else set())


def test_command_name_is_found_in_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert app.command_name(["--version"]) is None
    assert app.command_name(["plan", "x", "--load", "3"]) == "plan"
    monkeypatch.setenv("_TRIMTAB_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "trimtab status --ad")
    monkeypatch.setenv("COMP_CWORD", "2")
    done = subprocess.run([sys.executable, "-m", "trimtab"], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["--address"]


def test_plan_and_explain_print_json(tmp_path: Path, capsys: Captured) -> None:
    pipeline, profile = str(write_echo_pipeline(tmp_path)), str(a_profile_file(tmp_path))
    outputs = []
    for verb in ("plan", "explain"):
        assert run([verb, pipeline, "--load", "5", "--profiles", profile, "--what-if", "budget=x2", "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.out.count("\n") == 1
        assert "profile " in captured.err
        outputs.append(json.loads(captured.out))
    for facts in outputs:
        assert PipelinePlan.model_validate(facts["plan"]).spec.feasible
        assert {"change", "accuracy", "cores", "latency_seconds"} <= facts["alternatives"][0].keys()
        assert facts["sensitivities"]


def test_report_prints_json_and_writes_html(tmp_path: Path, capsys: Captured) -> None:
    run_record.save(a_run(), tmp_path)
    assert run(["report", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    (report,) = json.loads(captured.out)
    assert (report["title"], report["received"], sum(report["outcomes"].values())) == ("made by hand", 1200, 1200)
    assert "1128 ok + 60 late" in " ".join(captured.err.split())
    assert (tmp_path / "report.html").stat().st_size > 1_000_000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("plan", "--load", "inf"), "rate inf must lie between 0 and"),
        (("plan", "--load", "nan"), "rate nan must lie between 0 and"),
        (("explain", "--load", "-3"), "rate -3 must lie between 0 and"),
        (("up", "--folder", "/dev/null/run", "--profiles", "/nowhere"), "cannot be a run folder: Not a directory"),
        (("up", "--duration", "nan"), "--duration nan: seconds must be above 0, and finite"),
        (("loadtest", "--load", "5", "--duration", "1", "--address", "127.0.0.1:99999"), "must be HOST:PORT"),
        (("loadtest", "--load", "5", "--duration", "1", "--address", "nonsense"), "must be HOST:PORT"),
        (("up", "--load", "5", "--duration", "1", "--samples", "/nowhere"), "--samples /nowhere: no samples there"),
        (("up", "--samples", "/nowhere"), "--samples needs a load"),
        (("evaluate", "--samples", "/nowhere"), "--samples /nowhere: no samples there"),
        (("plan", "--load", "7", "--what-if", "slo=soon", "--profiles", "/nowhere"), "'soon' is not a duration"),
        (("explain", "--load", "7", "--what-if", "rain=2", "--profiles", "/nowhere"), "--what-if 'rain=2'"),
        (("simulate", "--load", "5", "--duration", "1", "--fail", "first@."), "write STAGE@SECONDS, such as first@30"),
        (("dashboard", "--address", "127.0.0.1:8082", "--in-cluster"), "give --address or --in-cluster, not both"),
        (("up", "--folder", "{folder}"), "is the pipeline's folder"),
        (("up", "--trace", "{folder}/trace.csv"), "trace.csv, line 3 holds"),
        (("up", "--trace", "gone.csv"), "gone.csv: no such trace file"),
        (("up", "--load", "lots"), "load 'lots' is not known"),
        (("up", "--load", "constant:5", "--trace", "x.csv"), "give --load or --trace, not both"),
        (("up", "--load", "multimodal:rps=5", "--duration", "5"), "sets the images of each chat"),
        (("compare", "--load", "multimodal:rps=5", "--duration", "5"), "sets the images of each chat"),
        (("loadtest",), "no load"),
        (
            ("loadtest", "--load", "20", "--duration", "1", "--protocol", "chat"),
            "--protocol chat sends only `messages`, `images` and `options`",
        ),
        (("plan", "--load", "5", "--profiles", "{folder}/first.yaml"), "first.yaml: no profile of stage second"),
        (("explain", "--profiles", "{folder}/first.yaml"), "give --load"),
        (("simulate",), "no load: give --trace FILE or --load"),
        (("simulate", "--load", "constant:5", "--duration", "5"), "has no profile: give --profiles FILE"),
    ],
)
def test_user_error_is_one_line(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], complaint: str
) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))  # holds no profile
    (tmp_path / "trace.csv").write_text("rps\n3\nmany\n")
    (tmp_path / "first.yaml").write_text(dump_yaml(a_profile("first", [a_point_profile("fast")])))
    verb, *options = (argument.format(folder=tmp_path) for argument in arguments)
    assert complaint in said(capsys, 2, verb, str(write_echo_pipeline(tmp_path)), *options)


@pytest.mark.parametrize("where", ["http://127.0.0.1:8080", "127.0.0.1:8080"])
def test_address_given_as_pipeline_is_explained(capsys: Captured, where: str) -> None:
    assert "by --address HOST:PORT" in said(capsys, 2, "loadtest", where, "--load", "5")


class Interrupted:
    """A module whose import Ctrl-C interrupts."""

    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


def test_ctrl_c_during_import_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setitem(sys.modules, "trimtab.app", Interrupted())
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capsys.readouterr().err) == (130, "trimtab: interrupted\n")


def test_path_in_brackets_is_printed_verbatim(tmp_path: Path, capsys: Captured) -> None:
    """In rich, [run] is a style tag."""
    folder = tmp_path / "[run]"
    pipeline, profiles, plan = write_echo_pipeline(folder), a_profile_file(folder), folder / "plan.json"
    assert run(["plan", str(pipeline), "--load", "5", "--profiles", str(profiles), "-o", str(plan)]) == 0
    output = capsys.readouterr().out
    assert f"profile {profiles} (as requested)" in output
    assert f"written to {plan}" in output


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"storageUri": "weights/gone.safetensors"}, "stage first, variant fast: storageUri weights/gone.safetens"),
        ({"family": "acme/none"}, "stage first, variant fast: unknown family 'acme/none'"),
        ({"family": "no_such.models:Model"}, "no_such"),
        ({"family": "", "storageUri": "", "container": {"image": "x"}}, "an image only runs in a cluster"),
    ],
)
def test_unservable_variant_is_rejected_before_start(tmp_path, capsys: Captured, changes, complaint):
    path = write_echo_pipeline(tmp_path)
    document = load_pipeline(path).model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"]["stages"][0]["variants"][0] |= changes
    path.write_text(dump_yaml(InferencePipeline.model_validate(document)))
    for verb, *options in (("up",), ("profile",), ("evaluate", "--samples", "x")):
        assert complaint in said(capsys, 2, verb, str(path), *options)


def test_working_directory_stays_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    pipeline, profile = str(write_echo_pipeline(tmp_path / "p")), str(a_profile_file(tmp_path))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    assert run(["simulate", pipeline, "--load", "5", "--duration", "3", "--profiles", profile]) == 0
    run_record.save(a_run(), tmp_path / "recorded")
    assert run(["report", str(tmp_path / "recorded")]) == 0
    assert not list(here.iterdir())
    assert (tmp_path / "cache" / "reports" / "simulate.html").exists()
    assert "reports/simulate.html" in capsys.readouterr().out


def test_status_prints_accuracy_sources(capsys: Captured) -> None:
    served = RecentRequests(received=10, ok=9, dropped=1, p99_seconds=0.2, accuracy=0.9)
    state = RouterState(ready=True, served=served, accuracy_sources="declared and measured", stages={})
    counters = Counters(pipeline="mine", received=10, outcomes={"ok": 9, "dropped": 1})

    status.print_status(state, counters)

    assert "expected accuracy 0.9000 (declared and measured)" in " ".join(capsys.readouterr().out.split())


def test_pipelines_table_shows_accuracy_sources() -> None:
    named = {"name": "echoes", "namespace": "here"}
    written = a_pipeline().model_dump(mode="json", by_alias=True, exclude_none=True)
    known = {**written, "metadata": named, "status": {"accuracy": "0.900"}}
    newer = {**known, "spec": {"unheard": "of"}}

    columns = [[str(cell) for cell in column.cells] for column in status.pipelines_table([known, newer]).columns]

    assert ["0.900 (declared)", "0.900 (unknown source)"] in columns
