"""The house can be read from outside: each folder says what it answers, the map is true, and no file is a drawer."""

import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_OURS = frozenset({"build", "dist", "out", "shared"})
FOLDERS = sorted(path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in NOT_OURS)
MAP = (ROOT / "docs" / "architecture.md").read_text()
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
MOST_SOURCE_LINES = 450
PAGE_LINES, PAGE_COLUMNS = 60, 120
MAP_LINES = 90


def rooms_there_are() -> set[str]:
    """The folders inside packages, as the map writes them."""
    inside = chain.from_iterable(folder.glob("trimtab*/**/__init__.py") for folder in FOLDERS)
    return {f"{path.parent.relative_to(ROOT)}/" for path in inside if len(path.relative_to(ROOT).parts) > 3}


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in folder.rglob("*.py")]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_folder_says_what_it_answers(folder: Path):
    assert (folder / "README.md").read_text().startswith("# ")


def test_the_map_names_every_room_and_no_other():
    named = set(re.findall(r"^\| `([a-z_]+/trimtab\w*/[\w/]+/)` \|", MAP, re.MULTILINE))

    assert named == rooms_there_are()


def test_whatever_folder_the_map_names_is_there():
    named = re.findall(r"`([a-z_]+/(?:[\w/]+/)?)`", MAP.partition("## Rooms")[0])

    assert [name for name in named if not list(ROOT.glob(name)) and not list(ROOT.glob(f"*/trimtab*/{name}"))] == []


def test_the_map_is_one_page():
    assert len(MAP.splitlines()) <= MAP_LINES


def test_no_source_is_a_drawer():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}

    assert {path: count for path, count in lines.items() if count > MOST_SOURCE_LINES} == {}


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_is_one_page(page: Path):
    lines = page.read_text().splitlines()

    assert len(lines) <= PAGE_LINES
    assert max(map(len, lines)) <= PAGE_COLUMNS


def number_of(page: Path) -> int:
    return int(page.name.partition("-")[0])


SUPERSEDED = [
    (number_of(page), int(old))
    for page in DECISIONS
    for sentence in re.findall(r"[Ss]upersedes\s[^:;.,]*", page.read_text())
    for old in re.findall(r"\b\d{1,3}\b", sentence)
]


def test_pages_that_supersede_others_are_found():
    assert {(31, 24), (24, 16), (23, 2), (21, 15)} <= set(SUPERSEDED)


@pytest.mark.parametrize(("newer", "older"), SUPERSEDED)
def test_a_page_that_is_superseded_says_by_which(newer: int, older: int):
    (page,) = (page for page in DECISIONS if number_of(page) == older)

    assert re.search(rf"[Ss]uperseded[^.]*\b(page|decision) {newer}\b", page.read_text())
