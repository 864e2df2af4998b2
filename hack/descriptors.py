"""Compiles the protocol's .proto into the descriptors that Trimtab loads: `descriptors.py FOLDER [--check]`."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from grpc_tools import protoc

from trimtab_pipelines.rendering import write_or_check

SUFFIX = ".binpb"


def render(folder: Path) -> dict[str, bytes]:
    """Map the name of each file of descriptors to its content, as the .proto files in a folder are now."""
    return {source.with_suffix(SUFFIX).name: _compiled(source) for source in sorted(folder.glob("*.proto"))}


def _compiled(source: Path) -> bytes:
    with TemporaryDirectory() as into:
        compiled = Path(into) / "descriptors"
        if protoc.main(["protoc", f"--proto_path={source.parent}", f"--descriptor_set_out={compiled}", source.name]):
            raise SystemExit(f"{source}: protoc refuses it")
        return compiled.read_bytes()


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], render(Path(sys.argv[1])), SUFFIX))
