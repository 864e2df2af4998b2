"""Compiled forms: the forward pass on one course as native code, made once and kept beside the weights.

A form computes with the weights of the transformer in memory; it holds none. It takes any number of rows up to its
bound, so that nothing is compiled while requests wait. Its name tells its content: a pipeline that names a form runs
that code and no other, whatever else lies beside the weights.
"""

import json
import os
import platform
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from trimtab_model_servers.cpu_features import instructions
from trimtab_model_servers.download_limits import sha256
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer

PREFIX, SUFFIX = "inductor-", ".pt2"
_DIGITS = 32
"""Of the SHA-256 in a form's name."""
_COMPILERS = ("g++", "clang++", "c++")
_MADE_FOR = "trimtab"
"""Where a form says what it was made for."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A form ready to compute: images [B, channels, side, side], B at most `max_rows`, to features [B, d]."""

    run: Callable[[Tensor], Tensor]
    max_rows: int


class _PlannedForward(nn.Module):
    """A transformer on one course, computing in one type of numbers."""

    def __init__(self, transformer: VisionTransformer, course: ForwardPlan, half: torch.dtype | None) -> None:
        super().__init__()
        self.transformer, self._course, self._half = transformer, course, half

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", self._half or torch.bfloat16, enabled=self._half is not None):
            features: Tensor = self.transformer(images, self._course)
        return features


def compiler_problem() -> str:
    """Why nothing can be compiled here; empty where it can."""
    asked = os.environ.get("CXX", "")
    if not any(shutil.which(name) for name in ([asked] if asked else _COMPILERS)):
        return f"there is no C++ compiler here ({asked or ', '.join(_COMPILERS)}); install one"
    if not (Path(torch.__file__).parent / "include").is_dir():
        return "this installation of torch has no headers to compile against (torch/include)"
    return ""


def compile_form(
    transformer: VisionTransformer, plan: ForwardPlan, half: torch.dtype | None, max_rows: int, folder: Path
) -> str:
    """Compile a transformer on a course for the processor here, with torch's inductor, and return the form's name.

    Args:
        transformer: on cores.
        course: without prompts.
        half: what products are computed in, where that is not FP32.
        most_rows: of a batch, at least 2.
        folder: where the form is written.

    Raises:
        ModelError: it cannot be compiled.
    """
    if missing := compiler_problem():
        raise ModelError(missing)
    shape = transformer.shape
    images = torch.rand(max(2, max_rows), shape.channels, shape.side, shape.side)
    made_for = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "instructions": sorted(instructions()),
        "most_rows": len(images),
    }
    settings = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.metadata": {_MADE_FOR: json.dumps(made_for)},
        "cpp.dynamic_threads": True,
    }
    unnamed = folder / f"unnamed{SUFFIX}"
    rows = torch.export.Dim("rows", min=1, max=len(images))
    try:
        with torch.no_grad():
            exported = torch.export.export(
                _PlannedForward(transformer, plan, half), (images,), dynamic_shapes=({0: rows},)
            )
        torch._inductor.aoti_compile_and_package(  # noqa: SLF001  (documented by this name)
            exported, package_path=str(unnamed), inductor_configs=settings
        )
    except Exception as error:  # a compiler may fail in any way
        raise ModelError(f"it cannot be compiled: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    name = _named(unnamed)
    unnamed.rename(folder / f"{name}{SUFFIX}")
    return name


def load_form(name: str, folder: Path, transformer: VisionTransformer) -> Compiled:
    """Read a form that lies beside weights, and give it these weights.

    Raises:
        ModelError: there is none of that name and content, or it was made for another torch, processor or transformer.
    """
    path = folder / f"{name}{SUFFIX}"
    if not path.is_file():
        raise ModelError(f"there is no {path}; `trimtab tune` compiles forms and writes them beside weights in files")
    if _named(path) != name:
        raise ModelError(f"{path} does not hold what its name says; compile it anew by `trimtab tune`")
    most_rows = _require_made_for_here(path)
    try:
        package = torch._inductor.aoti_load_package(str(path))  # noqa: SLF001  (as above)
        own = {f"transformer.{key}": value for key, value in transformer.state_dict().items()}
        wanted = {key: own[key] for key in package.get_constant_fqns()}
        package.load_constants(wanted, check_full_update=True, user_managed=True)
    except (KeyError, RuntimeError) as error:
        raise ModelError(f"{path} was compiled for a transformer of another shape ({error})") from error
    return Compiled(package, most_rows)


def _require_made_for_here(path: Path) -> int:
    """Check what a form says before any of its code runs: the most rows that it takes."""
    try:
        with zipfile.ZipFile(path) as packed:
            told = next(json.loads(packed.read(name)) for name in packed.namelist() if name.endswith("_metadata.json"))
        made_for = json.loads(told[_MADE_FOR])
        lacking = sorted(set(made_for["instructions"]) - instructions())
        before = made_for["torch"], made_for["machine"]
        most_rows = int(made_for["most_rows"])
    except (OSError, zipfile.BadZipFile, StopIteration, KeyError, ValueError, TypeError) as error:
        raise ModelError(f"{path}: no form that `trimtab tune` compiled ({error!r})") from error
    if before != (torch.__version__, platform.machine()):
        raise ModelError(f"{path} was compiled with torch {before[0]} for {before[1]}; compile it anew here")
    if lacking:
        raise ModelError(f"{path} was compiled for a processor with {', '.join(lacking)}, which this one lacks")
    return most_rows


def _named(path: Path) -> str:
    return PREFIX + sha256(path).removeprefix("sha256:")[:_DIGITS]
