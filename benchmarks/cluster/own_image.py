"""Custom model-server image of docs/develop/bring-your-own-model.md: it knows the added model family."""

import re
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.cluster.setting import ROOT, run

PAGE: Final = ROOT / "docs" / "develop" / "bring-your-own-model.md"
IMAGE: Final = "localhost/trimtab-own-model-server:e2e"
CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
_FILES: Final = re.compile(r"`([\w/.]+)`:\n```(?:python|toml|yaml|dockerfile)\n(.*?)```", re.DOTALL)
_KNOWS: Final = (
    "from importlib.metadata import entry_points; "
    "print(sum(bool(found.load()) for found in entry_points(group='trimtab.families')))"
)


async def families_in_own_image() -> int:
    """Build it; count the families from outside that its Python finds. Raises CommandError where it does not build."""
    with tempfile.TemporaryDirectory() as folder:
        await run("buildah", "bud", "--isolation", "chroot", *_written(Path(folder)), "-t", IMAGE, folder)
    container = (await run("buildah", "from", "--pull=never", IMAGE)).strip()
    try:
        return int(await run("buildah", "run", "--isolation", "chroot", container, "--", "python", "-c", _KNOWS))
    finally:
        await run("buildah", "rm", container)
        await run("buildah", "rmi", IMAGE)


def _written(folder: Path) -> tuple[str, ...]:
    """Write the page's files, and say how what they need is fetched: as this machine fetches."""
    for name, text in _FILES.findall(PAGE.read_text()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "acme" / "acme" / "__init__.py").touch()
    return "--network", "host", *(("-v", f"{CERTIFICATES}:{CERTIFICATES}:ro") if CERTIFICATES.exists() else ())
