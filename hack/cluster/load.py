"""Moves an image from an OCI layout into a containerd, sending only the blobs that containerd lacks.

Dependencies are gigabytes and change rarely, code is a few megabytes and changes often: an archive of the whole image
would take minutes where this takes seconds. usage: load.py LAYOUT IMAGE SOCKET ROOT
"""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINK_FROM_BYTES = 1 << 20


def main(layout: Path, image: str, socket: str, root: Path) -> None:
    """Send the image; keep in the layout only what its images need, sharing large blobs with containerd."""
    index = json.loads((layout / "index.json").read_text())
    # What had this name before stays in the index without one.
    index["manifests"] = [entry for entry in index["manifests"] if _name(entry)]
    (layout / "index.json").write_text(json.dumps(index))
    entry = next(entry for entry in index["manifests"] if _name(entry) == image)
    held = set(_run(socket, "content", "ls", "--quiet").split())
    lacking = [digest for digest in _blobs(layout, entry) if digest not in held]
    _import(layout, entry, image, lacking, socket)
    _prune(layout, index)
    # Before they are unpacked, so that gigabytes never lie there three times.
    for digest in _blobs(layout, entry):
        _share(_path(layout, digest), root / "io.containerd.content.v1.content" / "blobs" / digest.replace(":", "/"))
    _run(socket, "snapshots", "unpack", entry["digest"])


def _run(socket: str, *arguments: str) -> str:
    command = ["ctr", "--address", socket, "--namespace", "k8s.io", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _name(entry: dict[str, Any]) -> str:
    return str(entry.get("annotations", {}).get("org.opencontainers.image.ref.name", ""))


def _path(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")


def _blobs(layout: Path, entry: dict[str, Any]) -> Iterator[str]:
    """List an image's blobs, the manifest first."""
    yield entry["digest"]
    manifest = json.loads(_path(layout, entry["digest"]).read_text())
    yield manifest["config"]["digest"]
    yield from (layer["digest"] for layer in manifest["layers"])


def _import(layout: Path, entry: dict[str, Any], image: str, lacking: list[str], socket: str) -> None:
    index = {"schemaVersion": 2, "manifests": [entry | {"annotations": {"io.containerd.image.name": image}}]}
    command = ["ctr", "--address", socket, "--namespace", "k8s.io", "images", "import", "--no-unpack", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as importing:
        with tarfile.open(fileobj=importing.stdin, mode="w|") as archive:
            _add(archive, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
            _add(archive, "index.json", json.dumps(index).encode())
            for digest in lacking:
                archive.add(_path(layout, digest), "blobs/" + digest.replace(":", "/"))
        if importing.stdin is not None:
            importing.stdin.close()
    if importing.returncode != 0:
        sys.exit(f"load.py: containerd did not take {image}")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    header = tarfile.TarInfo(name)
    header.size = len(content)
    archive.addfile(header, io.BytesIO(content))


def _prune(layout: Path, index: dict[str, Any]) -> None:
    needed = {digest for entry in index["manifests"] for digest in _blobs(layout, entry)}
    for blob in (layout / "blobs" / "sha256").iterdir():
        if f"sha256:{blob.name}" not in needed:
            blob.unlink()


def _share(ours: Path, theirs: Path) -> None:
    """Make both names one file: neither side ever writes to a blob again."""
    if not theirs.exists() or ours.stat().st_size < LINK_FROM_BYTES or ours.samefile(theirs):
        return
    if ours.stat().st_dev == theirs.stat().st_dev:
        linked = ours.with_suffix(".linked")
        os.link(theirs, linked)
        linked.replace(ours)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
