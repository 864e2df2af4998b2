"""Every name is used: one that stands at its definition alone is work that nobody asked for, or a check never made."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.test_language import ROOT, module_of

OURS = sorted(path for path in ROOT.glob("*/trimtab*/**/*.py") if path.relative_to(ROOT).parts[0] != "build")
SOURCES = [*OURS, *(path for folder in ("benchmarks", "hack") for path in sorted((ROOT / folder).rglob("*.py")))]
OTHERS = [ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / "Dockerfile", *sorted((ROOT / "hack").rglob("*.sh"))]
"""Where names of ours may stand beside: entry points, and what images start."""
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "pipelines").glob("*/README.md"))]
"""Where users are told of names that they may write themselves, as `module:Class`."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def said_in(module: ast.Module) -> Iterator[str]:
    """Every name that is read in a module, those in its texts too; definitions and docstrings are none."""
    described = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            yield from re.findall(r"\w+", node.value)


def defined_in(module: ast.Module) -> Iterator[str]:
    """Functions, classes and constants at module level, and private methods; who is decorated is called by who did."""
    yield from _functions(module.body)
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from (name for name in _functions(node.body) if name.startswith("_"))
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def _functions(body: Iterable[ast.stmt]) -> Iterator[str]:
    return (node.name for node in body if isinstance(node, Function) and not node.decorator_list)


def is_special(name: str) -> bool:
    return name == "_" or (name.startswith("__") and name.endswith("__"))


@cache
def said_anywhere() -> Counter[str]:
    """Every name that product, benchmarks and scripts read; a test's reading keeps nothing alive."""
    said = Counter(name for path in SOURCES for name in said_in(module_of(path)))
    said += Counter(word for path in OTHERS for word in re.findall(r"\w+", path.read_text()))
    return said + Counter(name for page in PAGES for name in re.findall(r"trimtab_[\w.]+:(\w+)", page.read_text()))


def unused(path: Path) -> set[str]:
    """Private names must be read in their own file, the others anywhere."""
    own = Counter(said_in(module_of(path)))
    return {
        name
        for name in defined_in(module_of(path))
        if not is_special(name) and not (own if name.startswith("_") else said_anywhere())[name]
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_is_used(path: Path):
    assert unused(path) == set()


def test_a_name_that_stands_at_its_definition_alone_is_found():
    module = ast.parse('"""Says left_over."""\nleft_over = 1\ndef _kept(): ...\nclass A:\n    def _b(self): _kept()\n')

    assert set(defined_in(module)) - set(said_in(module)) == {"left_over", "A", "_b"}
