"""Candidate points of a vision transformer, and the precisions to try on a machine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trimtab_pipelines.operating_point import OperatingPoint, Precision, TokenMerging

FULL = OperatingPoint(name="full", accuracy=0)
SHARES = (0.04, 0.07, 0.09, 0.11, 0.13)
"""Shares of the patches that merge in each of twelve layers, more in models of fewer layers; ToMe uses 8, 13 and 16 of
196."""
STRONG_FROM = 0.09
"""Share from which the other merge rules are also tried."""
REFERENCE_DEPTH = 12
EARLY = 1.6
"""Ratio of the first layer's merges to the mean in early merging; it falls linearly over the layers."""
_Instructions = Mapping[Precision, Mapping[str, str]]
"""CPU instructions that multiply in a precision: names of Linux, mapped to names of the manufacturer."""
_X86: _Instructions = {
    "BF16": {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16"},
    "FP16": {"avx512_fp16": "AVX512-FP16", "amx_fp16": "AMX-FP16"},
    "INT8": {"avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "amx_int8": "AMX-INT8"},
}
_ARM: _Instructions = {"BF16": {"bf16": "BF16"}, "FP16": {"asimdhp": "ASIMDHP"}, "INT8": {"i8mm": "I8MM"}}
_ARM_FLAG = "asimd"
Gpu = Literal["None", "Here", "Elsewhere"]


def candidate_points(
    patches: int, depth: int, rules: Sequence[str], precisions: Sequence[Precision]
) -> list[OperatingPoint]:
    """Return the points to try, the full model first; all rates are tried with the first rule, strong ones with all."""
    points = [FULL, *_merged(patches, depth, rules)]
    for precision in precisions:
        points += [_with_precision(point, precision) for point in (FULL, *_merged(patches, depth, rules[:1]))]
    return points


def _merged(patches: int, depth: int, rules: Sequence[str]) -> Iterator[OperatingPoint]:
    counts = dict.fromkeys(max(1, round(share * patches * REFERENCE_DEPTH / depth)) for share in SHARES)
    strong = round(STRONG_FROM * patches * REFERENCE_DEPTH / depth)
    for count in [count for count in counts if count <= patches // 2]:
        for rule in rules if count >= strong else rules[:1]:
            yield _point(f"merge-{count}" + ("" if rule == rules[0] else f"-{rule}"), (count,), rule, rules[0])
        if count >= strong and depth > 1:
            slope = [count * (EARLY - 2 * (EARLY - 1) * layer / (depth - 1)) for layer in range(depth)]
            early = tuple(min(patches // 2, round(merged)) for merged in slope)
            yield _point(f"merge-{count}-early", early, rules[0], rules[0])


def _point(name: str, schedule: tuple[int, ...], rule: str, usual: str) -> OperatingPoint:
    merging = TokenMerging(schedule=schedule, rule=None if rule == usual else rule)
    return OperatingPoint(name=name, merging=merging, accuracy=0)


def _with_precision(point: OperatingPoint, precision: Precision) -> OperatingPoint:
    return point.replace(name=f"{point.name}-{precision.lower()}", precision=precision)


@dataclass(frozen=True, slots=True)
class TuningHardware:
    """Hardware that points are measured on."""

    gpu: Gpu
    """Whether the variant requests no GPU, the local one, or one that is not here: then points run on CPUs."""
    instructions: frozenset[str]
    """CPU flags reported by the kernel; empty if unknown."""

    def instructions_for(self, precision: Precision) -> str:
        """Names of the processor's instructions that multiply in a precision; empty if it has none."""
        flags = {**_X86.get(precision, {}), **_ARM.get(precision, {})}
        return " and ".join(name for flag, name in flags.items() if flag in self.instructions)


def precisions_to_try(machine: TuningHardware) -> list[Precision]:
    """Return BF16 and FP16 on a GPU; on CPUs BF16, INT8, and FP16 if the processor has instructions for it.

    Without such instructions FP16 is emulated so slowly that it would use up the time of the other precisions.
    """
    halves: list[Precision] = (
        ["BF16", "FP16"] if machine.gpu == "Here" or machine.instructions_for("FP16") else ["BF16"]
    )
    return [*halves, "INT8"] if machine.gpu == "None" else halves


def why_not_tried(machine: TuningHardware) -> Mapping[Precision, str]:
    """Return the reasons why precisions are not tried."""
    to_try: Sequence[Precision] = precisions_to_try(machine)
    reasons: Mapping[Precision, str] = {
        "FP16": _missing_instructions("FP16", machine),
        "INT8": "its kernels run on CPUs, not on a GPU",
    }
    return {precision: reason for precision, reason in reasons.items() if precision not in to_try}


def why_not_faster(precision: Precision, ratio: float, machine: TuningHardware) -> str:
    """Explain a precision that takes `ratio` times as long as the model's own."""
    slow = f"{ratio:.2f} × the time of the full model"
    if machine.gpu == "Here":
        return f"{slow} on this GPU"
    names = machine.instructions_for(precision)
    return (
        f"{slow}, though the processor has {names}" if names else f"{slow}: {_missing_instructions(precision, machine)}"
    )


def _missing_instructions(precision: Precision, machine: TuningHardware) -> str:
    if not machine.instructions:
        return "the processor's instructions are unknown"
    manufacturer = _ARM if _ARM_FLAG in machine.instructions else _X86
    return f"the processor has no {' or '.join(manufacturer[precision].values())}"
