"""Command lines in the documentation: their options exist, and a load that they send ends."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from tests.docs.test_pages import PAGES, ROOT
from trimtab.app import build_app
from trimtab_loadtester.load_spec import LoadError, LoadSpec

COMMANDS = (
    "up|demo|loadtest|compare|plan|explain|simulate|profile|evaluate|tune|train-task|status|dashboard|report|keys"
)
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
PAGES_WITH_COMMANDS = [*PAGES, *sorted(ROOT.glob("pipelines/*/README.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES_WITH_COMMANDS}


def command_lines(text: str) -> Iterator[str]:
    """Command lines of a page: those in fences, and those in code marks that name a load."""
    for fence in FENCE.finditer(text):
        yield from re.findall(rf"^ *(trimtab (?:{COMMANDS})\b.*)$", fence[0], re.MULTILINE)
    marked = rf"`(trimtab (?:{COMMANDS}) [^`]*--(?:load|trace) [^`]*)`"
    yield from (" ".join(line.split()) for line in re.findall(marked, FENCE.sub("", text)))


LINES = [(page, line) for page, text in TEXTS.items() for line in command_lines(text)]


def options_of(line: str) -> dict[str, Any]:
    """Return the parameters of a command line; raise typer's error for a wrong option."""
    _, verb, *rest = shlex.split(line.removesuffix("&"), comments=True)
    command = typer.main.get_command(build_app(verb))
    context = command.make_context("trimtab", [verb, *rest])
    found = command.commands[verb].make_context(verb, rest, parent=context)  # type: ignore[attr-defined]
    return dict(found.params)


def check_end(line: str) -> None:
    """Raise LoadError if a load is sent without end; a trace has its own, and plans are made for a load's peak."""
    parameters = options_of(line)
    if parameters.get("load") is not None and "duration_seconds" in parameters:
        LoadSpec.parse(parameters["load"]).rates(parameters["duration_seconds"])


@pytest.mark.parametrize(("page", "line"), LINES)
def test_commands_parse_and_their_loads_end(page: str, line: str):
    check_end(line)


def test_pages_have_command_lines():
    assert {"README.md", "docs/operate/security.md", "docs/develop/simulator.md"} <= {page for page, _ in LINES}


def test_load_without_an_end_is_rejected():
    (line,) = command_lines("```sh\ntrimtab loadtest PIPELINE --load constant:10  # try it\n```\n")

    with pytest.raises(LoadError, match="has no end"):
        check_end(line)
