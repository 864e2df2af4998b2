"""Compiled forms: native code of the forward pass with one plan, stored beside the weights.

A form uses the weights of the transformer in memory. It takes any number of rows up to its bound, so that nothing is
compiled while requests wait. Its name contains the hash of its content.
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

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer
from trimtab_model_servers.weights.files import sha256

_PREFIXES = ("avx", "amx", "fma", "f16c", "bmi", "sse", "gfni", "vaes", "asimd", "sve", "sme", "i8mm", "bf16")
"""Prefixes of instruction sets that a compiler may use for this processor."""
PREFIX, SUFFIX = "inductor-", ".pt2"
_DIGITS = 32
"""Hexadecimal digits of the SHA-256 in a form's name."""
_COMPILERS = ("g++", "clang++", "c++")
_TARGET_KEY = "trimtab"
"""Metadata key of the target of a form."""


def instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction set extensions by their Linux names; empty if the kernel does not report them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(name for name in flags.split() if name.startswith(_PREFIXES))


@dataclass(frozen=True, slots=True)
class Compiled:
    """Loaded form: maps images [B, channels, side, side], B at most `max_rows`, to features [B, d]."""

    run: Callable[[Tensor], Tensor]
    max_rows: int


class _PlannedForward(nn.Module):
    """A transformer with one plan and data type."""

    def __init__(self, transformer: VisionTransformer, plan: ForwardPlan, half: torch.dtype | None) -> None:
        super().__init__()
        self.transformer, self._plan, self._half = transformer, plan, half

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", self._half or torch.bfloat16, enabled=self._half is not None):
            features: Tensor = self.transformer(images, self._plan)
        return features


def compiler_problem() -> str:
    """Why this machine cannot compile; empty if it can."""
    named = os.environ.get("CXX", "")
    if not any(shutil.which(name) for name in ([named] if named else _COMPILERS)):
        return f"no C++ compiler ({named or ', '.join(_COMPILERS)}); install one"
    if not (Path(torch.__file__).parent / "include").is_dir():
        return "this installation of torch has no headers (torch/include)"
    return ""


def compile_form(
    transformer: VisionTransformer, plan: ForwardPlan, half: torch.dtype | None, max_rows: int, folder: Path
) -> str:
    """Compile a plan without prompts for this CPU by torch's inductor; return the form's name; raises ModelError.

    ``half`` is the data type of products, unless FP32; ``max_rows`` is at least 2.
    """
    if problem := compiler_problem():
        raise ModelError(problem)
    shape = transformer.shape
    images = torch.rand(max(2, max_rows), shape.channels, shape.side, shape.side)
    target = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "instructions": sorted(instructions()),
        "max_rows": len(images),
    }
    settings = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.metadata": {_TARGET_KEY: json.dumps(target)},
        "cpp.dynamic_threads": True,
    }
    temporary = folder / f"unnamed{SUFFIX}"
    rows = torch.export.Dim("rows", min=1, max=len(images))
    try:
        with torch.no_grad():
            exported = torch.export.export(
                _PlannedForward(transformer, plan, half), (images,), dynamic_shapes=({0: rows},)
            )
        torch._inductor.aoti_compile_and_package(  # noqa: SLF001  (documented by this name)
            exported, package_path=str(temporary), inductor_configs=settings
        )
    except Exception as error:  # a compiler may fail in any way
        raise ModelError(f"compilation failed: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    name = form_name(temporary)
    temporary.rename(folder / f"{name}{SUFFIX}")
    return name


def load_form(name: str, folder: Path, transformer: VisionTransformer) -> Compiled:
    """Bind a form to the weights of a transformer; ModelError if it is absent or of another machine or shape."""
    path = folder / f"{name}{SUFFIX}"
    if not path.is_file():
        raise ModelError(f"{path} does not exist; `trimtab tune` compiles forms")
    if form_name(path) != name:
        raise ModelError(f"the content of {path} does not match its name; compile it again with `trimtab tune`")
    max_rows = _check_target(path)
    try:
        package = torch._inductor.aoti_load_package(str(path))  # noqa: SLF001  (as above)
        weights = {f"transformer.{key}": value for key, value in transformer.state_dict().items()}
        constants = {key: weights[key] for key in package.get_constant_fqns()}
        package.load_constants(constants, check_full_update=True, user_managed=True)
    except (KeyError, RuntimeError) as error:
        raise ModelError(f"{path} was compiled for a transformer of another shape ({error})") from error
    return Compiled(package, max_rows)


def _check_target(path: Path) -> int:
    """Check a form's target before loading its code; return its largest number of rows."""
    try:
        with zipfile.ZipFile(path) as packed:
            metadata = next(
                json.loads(packed.read(name)) for name in packed.namelist() if name.endswith("_metadata.json")
            )
        target = json.loads(metadata[_TARGET_KEY])
        missing = sorted(set(target["instructions"]) - instructions())
        version, machine = target["torch"], target["machine"]
        max_rows = int(target["max_rows"])
    except (OSError, zipfile.BadZipFile, StopIteration, KeyError, ValueError, TypeError) as error:
        raise ModelError(f"{path}: not a form compiled by `trimtab tune` ({error!r})") from error
    if (version, machine) != (torch.__version__, platform.machine()):
        raise ModelError(f"{path} was compiled with torch {version} for {machine}; compile it again here")
    if missing:
        raise ModelError(f"{path} was compiled for a processor with {', '.join(missing)}, which this one lacks")
    return max_rows


def form_name(path: Path) -> str:
    return PREFIX + sha256(path).removeprefix("sha256:")[:_DIGITS]
