"""Layout of the repository: folders have a README, the architecture page names every package folder, decisions fit."""

import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_OURS = frozenset({"build", "dist", "out", "shared"})
FOLDERS = sorted(path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in NOT_OURS)
DOCS = ROOT / "docs"
ARCHITECTURE = (DOCS / "architecture.md").read_text()
DECISIONS = sorted((DOCS / "decisions").glob("*.md"))
MAX_SOURCE_LINES = 600
MAX_ARCHITECTURE_LINES = 100
MAX_DECISION_LINES, MAX_DECISION_COLUMNS = 60, 120
STATUS = re.compile(
    r"Status: (?:superseded by \d+|accepted(?:; supersedes \d+(?: in part)?)?(?:; superseded in part by \d+)?)"
)


def package_folders() -> set[str]:
    """Folders inside packages, as the architecture page writes them."""
    inside = chain.from_iterable(folder.glob("trimtab*/**/__init__.py") for folder in FOLDERS)
    return {f"{path.parent.relative_to(ROOT)}/" for path in inside if len(path.relative_to(ROOT).parts) > 3}


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in folder.rglob("*.py")]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_folder_has_a_readme(folder: Path):
    assert (folder / "README.md").read_text().startswith("# ")


def test_architecture_lists_all_package_folders_and_no_other():
    named = set(re.findall(r"^\| `([a-z_]+/trimtab\w*/[\w/]+/)` \|", ARCHITECTURE, re.MULTILINE))

    assert named == package_folders()


def test_folders_named_by_architecture_exist():
    named = re.findall(r"`([a-z_]+/(?:[\w/]+/)?)`", ARCHITECTURE.partition("## Package folders")[0])

    assert [name for name in named if not list(ROOT.glob(name)) and not list(ROOT.glob(f"*/trimtab*/{name}"))] == []


def test_architecture_is_one_page():
    assert len(ARCHITECTURE.splitlines()) <= MAX_ARCHITECTURE_LINES


def test_sources_have_at_most_600_lines():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}

    assert {path: count for path, count in lines.items() if count > MAX_SOURCE_LINES} == {}


def test_docs_index_links_every_page():
    linked = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)#:]+)", (DOCS / "README.md").read_text())}
    pages = {page for page in DOCS.rglob("*.md") if page.parent.name != "decisions" and page != DOCS / "README.md"}

    assert pages - linked == set()


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_decision_is_one_page(page: Path):
    lines = page.read_text().splitlines()

    assert len(lines) <= MAX_DECISION_LINES
    assert max(map(len, lines)) <= MAX_DECISION_COLUMNS


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_decision_has_a_title_and_a_status(page: Path):
    title, blank, status, *_ = page.read_text().splitlines()

    assert title.startswith(f"# {number_of(page)}. ")
    assert blank == ""
    assert STATUS.fullmatch(status)


def number_of(page: Path) -> int:
    return int(page.name.partition("-")[0])


def status_pairs(pattern: str) -> set[tuple[int, int]]:
    """Pairs of a page's number and the number that its status line names after the pattern."""
    statuses = {number_of(page): page.read_text().splitlines()[2] for page in DECISIONS}
    return {
        (number, int(other)) for number, line in statuses.items() for other in re.findall(rf"{pattern} (\d+)", line)
    }


def test_superseded_decisions_name_their_successors():
    supersedes = status_pairs("supersedes")
    superseded = status_pairs(r"superseded (?:in part )?by")

    assert len(supersedes) > 3
    assert supersedes == {(newer, older) for older, newer in superseded}
