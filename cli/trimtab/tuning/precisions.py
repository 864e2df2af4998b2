"""Precisions other than that of the weights: which are worth trying where, and why one saves no time. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trimtab_pipelines.operating_point import Precision

_Helpful = Mapping[Precision, Mapping[str, str]]
"""Instructions that multiply in a precision, as Linux calls them and as their makers do."""
_X86: _Helpful = {
    "BF16": {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16"},
    "FP16": {"avx512_fp16": "AVX512-FP16", "amx_fp16": "AMX-FP16"},
    "INT8": {"avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "amx_int8": "AMX-INT8"},
}
_ARM: _Helpful = {"BF16": {"bf16": "BF16"}, "FP16": {"asimdhp": "ASIMDHP"}, "INT8": {"i8mm": "I8MM"}}
_OF_EVERY_ARM = "asimd"


Gpu = Literal["None", "Here", "Elsewhere"]


@dataclass(frozen=True, slots=True)
class TuningHardware:
    """What forms are tried on.

    Attributes:
        gpu: whether the variant asks for none, for one that is here, or for one that is elsewhere: then forms are tried
            on cores.
        instructions: of the processor, as the kernel tells them; empty where it does not.
    """

    gpu: Gpu
    instructions: frozenset[str]

    def helpful(self, precision: Precision) -> str:
        """The processor's instructions that multiply in a precision, by their makers' names; empty for none."""
        known = {**_X86.get(precision, {}), **_ARM.get(precision, {})}
        return " and ".join(name for flag, name in known.items() if flag in self.instructions)


def worth_trying(machine: TuningHardware) -> list[Precision]:
    """Precisions to try: on a GPU both halves, on cores BF16 and INT8, and FP16 where the processor multiplies in it.

    Without such instructions FP16 is computed number by number, for so long that it would take the others' time.
    """
    halves: list[Precision] = ["BF16", "FP16"] if machine.gpu == "Here" or machine.helpful("FP16") else ["BF16"]
    return [*halves, "INT8"] if machine.gpu == "None" else halves


def untried(machine: TuningHardware) -> Mapping[Precision, str]:
    """Why the others are not tried."""
    tried: Sequence[Precision] = worth_trying(machine)
    reasons: Mapping[Precision, str] = {
        "FP16": f"not tried: {_lacking('FP16', machine)}",
        "INT8": "not tried: its kernels run on cores alone, not on a GPU",
    }
    return {precision: why for precision, why in reasons.items() if precision not in tried}


def why_not_faster(precision: Precision, ratio: float, machine: TuningHardware) -> str:
    """Why no form in a precision is kept that takes the model so many times as long."""
    slow = f"{precision} takes the model {ratio:.2f} × as long"
    if machine.gpu == "Here":
        return f"{slow} on this GPU"
    helpful = machine.helpful(precision)
    return f"{slow}, though this processor has {helpful}" if helpful else f"{slow}: {_lacking(precision, machine)}"


def _lacking(precision: Precision, machine: TuningHardware) -> str:
    if not machine.instructions:
        return "nobody tells what this processor multiplies in"
    maker = _ARM if _OF_EVERY_ARM in machine.instructions else _X86
    return f"no {' or '.join(maker[precision].values())} here"
