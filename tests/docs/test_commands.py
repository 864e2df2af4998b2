"""Command lines on the pages can be pasted: their options are known, and a load they send has an end."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from tests.docs.test_pages import PAGES, ROOT
from trimtab.app import build_app
from trimtab_loadtester.load_spec import LoadError, LoadSpec

SENDING = "up|load|simulate|compare|demo"
"""The commands that send a load, or simulate one: each second of it until its end."""
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
PLACED = [*PAGES, *sorted(ROOT.glob("pipelines/*/README.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PLACED}


def command_lines(text: str) -> Iterator[str]:
    """The lines to paste: those in fences, and those in code marks that name a load."""
    for fence in FENCE.finditer(text):
        yield from re.findall(rf"^ *(trimtab (?:{SENDING})\b.*)$", fence[0], re.MULTILINE)
    marked = rf"`(trimtab (?:{SENDING}) [^`]*--(?:load|trace) [^`]*)`"
    yield from (" ".join(line.split()) for line in re.findall(marked, FENCE.sub("", text)))


LINES = [(page, line) for page, text in TEXTS.items() for line in command_lines(text)]


def options_of(line: str) -> dict[str, Any]:
    """What the command of a line is called with; raises what the command line says of a wrong option."""
    _, verb, *rest = shlex.split(line.removesuffix("&"), comments=True)
    command = typer.main.get_command(build_app(verb))
    context = command.make_context("trimtab", [verb, *rest])
    found = command.commands[verb].make_context(verb, rest, parent=context)  # type: ignore[attr-defined]
    return dict(found.params)


def check_end(line: str) -> None:
    """Raise LoadError where the load of a line has no end; a trace has its own."""
    given = options_of(line)
    if given.get("load") is not None:
        LoadSpec.parse(given["load"]).rates(given["duration"])


@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_load_on_a_page_has_an_end(page: str, line: str):
    check_end(line)


def test_the_pages_have_such_lines():
    assert {"README.md", "docs/operate/security.md", "docs/develop/simulator.md"} <= {page for page, _ in LINES}


def test_a_load_without_an_end_is_found():
    (line,) = command_lines("```sh\ntrimtab load PIPELINE --load constant:10  # try it\n```\n")

    with pytest.raises(LoadError, match="has no end"):
        check_end(line)
