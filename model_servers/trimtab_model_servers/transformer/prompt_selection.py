"""Prompt variants: which trained prompts and head an operating point uses.

A prompt variant names the number and mode of prompts and the merging they were trained with. A point uses the variant
of its own merging, else the one without merging; a task with neither uses its plain head.
"""

from collections.abc import Collection, Iterable

from trimtab_model_servers.errors import ModelError
from trimtab_pipelines.operating_point import OperatingPoint, TokenMerging

PLAIN = "plain"


def prompt_variant(point: OperatingPoint) -> str:
    """The variant that matches a point exactly, such as `replace-4`, `merge-8` or `replace-2+merge-8-energy`."""
    prompts = f"{point.prompts.mode.lower()}-{point.prompts.count}" if point.prompts else ""
    return "+".join(part for part in (prompts, _merge_suffix(point.merging)) if part) or PLAIN


def prompt_variants(point: OperatingPoint) -> tuple[str, ...]:
    """The variants that a point may use, best first."""
    unmerged = prompt_variant(point.model_copy(update={"merging": None}))
    return tuple(dict.fromkeys((prompt_variant(point), unmerged)))


def require_trained(point: OperatingPoint, trained: Collection[str]) -> None:
    """Raise ModelError if none of a point's variants is trained."""
    if not any(variant in trained for variant in prompt_variants(point)):
        raise ModelError(
            f"operating point {point.name!r}: {prompt_variants(point)[0]!r} is not trained for these tasks; "
            f"the weights have: {', '.join(trained)}"
        )


def fallback_order(point: OperatingPoint) -> tuple[str, ...]:
    """The variants that a task may use at a point, best first; the last is PLAIN."""
    return tuple(dict.fromkeys((*prompt_variants(point), PLAIN)))


def prompt_counts(points: Iterable[OperatingPoint]) -> dict[str, int]:
    """Prompts per layer of every variant that some points use."""
    counts = {
        variant: point.prompts.count if point.prompts else 0
        for point in points
        for variant in prompt_variants(point)
        if variant != PLAIN
    }
    return {PLAIN: 0} | counts


def _merge_suffix(merging: TokenMerging | None) -> str:
    if merging is None or not any(merging.schedule):
        return ""
    return "-".join(["merge", ".".join(map(str, merging.schedule)), *([merging.rule] if merging.rule else [])])
