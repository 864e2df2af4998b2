"""Language of the repository: the field's terms in code and docs, docstrings that name their module, names of tests."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(ROOT.glob("*/trimtab*"))
PRODUCT = sorted(chain.from_iterable(package.rglob("*.py") for package in PACKAGES))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
TEXTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "*/README.md", "charts/**/*.yaml", "charts/**/*.txt", "charts/**/*.tpl")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
WORDS = [
    line.split("\t")
    for line in (ROOT / "tests" / "house" / "words.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
REPLACED = re.compile("|".join(f"(?:{pattern})" for pattern, _ in WORDS), re.IGNORECASE)
QUESTION = re.compile(r"(What|How|Which|Where|Who|Whose|When|Whether|Why)\b")
MAX_TEST_NAME = 60
MAX_COLLABORATORS = 8
MAX_README_LINES = 100
MAX_SMALL_MODULES = 25
SMALL_LINES = 40


def term_for(word: str) -> str:
    """The term that replaces a word."""
    return next(term for pattern, term in WORDS if re.fullmatch(pattern, word, re.IGNORECASE))


def replaced_words(text: str) -> list[str]:
    """Each replaced word of a text with its line and the term to use; names count by their parts."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", text)
    return [
        f"line {text_line}: {match[0]!r}; write: {term_for(match[0])}"
        for text_line, line in enumerate(spaced.splitlines(), 1)
        for match in REPLACED.finditer(line)
    ]


@cache
def module_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", [*PRODUCT, *TESTS, *BENCHMARKS, *TEXTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_replaced_word_is_used(path: Path):
    if path.parent == Path(__file__).parent:
        pytest.skip("the list itself")

    assert replaced_words(path.read_text()) == []


def test_a_replaced_word_is_found_in_a_name():
    assert replaced_words("class FrontDesk:\n    departure_policy = 1") == [
        "line 1: 'Desk'; write: scheduler",
        "line 2: 'departure'; write: dispatch",
    ]


def test_docstrings_begin_with_the_noun():
    questions = [str(path) for path in PRODUCT if QUESTION.match(ast.get_docstring(module_of(path)) or "")]

    assert questions == []


def test_test_names_are_short():
    names = {
        node.name
        for path in TESTS
        for node in ast.walk(module_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }

    assert {name for name in names if len(name) > MAX_TEST_NAME} == set()


def constructors(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Each class with the number of parameters of its constructor, `self` not counted."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    yield node.name, len(method.args.args) + len(method.args.kwonlyargs) - 1


def test_constructors_have_few_collaborators():
    large = {
        f"{path.relative_to(ROOT)}:{name}": count
        for path in PRODUCT
        for name, count in constructors(module_of(path))
        if count > MAX_COLLABORATORS
    }

    assert large == {}


def private_access(module: ast.Module) -> set[str]:
    """Private names that a module imports, or reads of other objects than `self` and `cls`."""
    nodes = list(ast.walk(module))
    names = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    names |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr != "_replace"  # a public method of named tuples
        and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
    }
    return {name for name in names if re.match(r"_[a-z]", name)}


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_use_public_names(path: Path):
    assert private_access(module_of(path)) == set()


def test_few_modules_are_small():
    small = [
        str(path.relative_to(ROOT))
        for path in PRODUCT
        if not path.stem.startswith("__") and len(path.read_text().splitlines()) < SMALL_LINES
    ]

    assert len(small) <= MAX_SMALL_MODULES, small


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES
