"""A module that calls itself pure is: it neither reads a clock nor draws, waits, logs or reaches out."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPURE = frozenset(
    {
        *("aiohttp", "asyncio", "grpc", "httpx", "kubernetes", "logging", "multiprocessing", "random", "secrets"),
        *("socket", "subprocess", "threading", "time", "uuid"),
    }
)


def says_it_is_pure(module: ast.Module) -> bool:
    """Whether it does, however the sentence goes on: "Pure.", "Pure: no clock", "Pure numpy"."""
    return re.search(r"\bPure\b", ast.get_docstring(module) or "") is not None


def imported(module: ast.Module) -> set[str]:
    """The top-level packages that a module imports, wherever in it."""
    names = {alias.name for node in ast.walk(module) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(module) if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


PURE = [
    path.relative_to(ROOT)
    for path in sorted(ROOT.glob("*/trimtab*/**/*.py"))
    if not path.is_relative_to(ROOT / ".venv") and says_it_is_pure(ast.parse(path.read_text()))
]


def test_the_modules_that_decide_say_that_they_are_pure():
    assert Path("router/trimtab_router/scheduling/stage_scheduler.py") in PURE
    assert Path("adapter/trimtab_adapter/planning/decide.py") in PURE
    assert Path("router/trimtab_router/scheduling/queue.py") in PURE  # "Pure: no clock, no network."
    assert Path("adapter/trimtab_adapter/solvers/dominance.py") in PURE  # "Pure numpy."
    assert len(PURE) > 130


@pytest.mark.parametrize("path", PURE, ids=str)
def test_what_calls_itself_pure_is(path):
    assert not imported(ast.parse((ROOT / path).read_text())) & IMPURE
