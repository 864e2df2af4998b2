"""Runner of the real helm on the repository's charts."""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.control_plane import tool

CHART = Path(__file__).parents[2] / "charts" / "trimtab"
KINDS_CHART = CHART / "charts" / "trimtab-crds"
VALUES = Path(__file__).parents[1] / "data" / "charts"
RELEASE_NAMESPACE = "trimtab-system"
KUBERNETES = "1.34.0"
SETS = ("default", "namespaced", "monitoring", "everything")
Manifest = dict[str, Any]


def helm(*arguments: str | Path, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm with nothing of the user's own settings."""
    with tempfile.TemporaryDirectory(prefix="trimtab-helm-") as home:
        environment = {"PATH": os.environ["PATH"], "HOME": home}
        if kubeconfig is not None:
            environment["KUBECONFIG"] = str(kubeconfig)
        return subprocess.run(
            [tool("helm"), *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
        )


def must(*arguments: str | Path, kubeconfig: Path | None = None) -> str:
    """Run helm and return what it printed; fail with what it complained of."""
    done = helm(*arguments, kubeconfig=kubeconfig)
    assert done.returncode == 0, done.stderr
    return done.stdout


def template(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Render the chart."""
    return helm("template", "trimtab", CHART, "-n", RELEASE_NAMESPACE, "--kube-version", KUBERNETES, *arguments)


def rendered(values: str) -> list[Manifest]:
    """The manifests of one of the value sets."""
    done = template("-f", VALUES / f"{values}.values.yaml")
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest is not None]


def pod_specs(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The pod templates by the name of what makes them."""
    found = {}
    for manifest in manifests:
        spec = manifest.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        if "template" in spec:
            found[manifest["metadata"]["name"]] = spec["template"]["spec"]
    return found
