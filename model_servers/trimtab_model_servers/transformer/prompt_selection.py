"""Which trained prompts and head an operating point runs with. Pure; no torch.

A *way* is what they were trained for: how many prompts, in which mode, with how much merging going on meanwhile. A
point runs with those trained for just what it does, else with those trained without merging. A task that has neither
runs there with its plain head.
"""

from collections.abc import Collection, Iterable

from trimtab_model_servers.errors import ModelError
from trimtab_pipelines.operating_point import OperatingPoint, TokenMerging

PLAIN = "plain"


def prompt_variant(point: OperatingPoint) -> str:
    """Name the way that fits a point exactly, such as `replace-4`, `merge-8` or `replace-2+merge-8-energy`."""
    prompts = f"{point.prompts.mode.lower()}-{point.prompts.count}" if point.prompts else ""
    return "+".join(part for part in (prompts, _merged(point.merging)) if part) or PLAIN


def prompt_variants(point: OperatingPoint) -> tuple[str, ...]:
    """Name the ways that will do for a point, the best first."""
    unmerged = prompt_variant(point.model_copy(update={"merging": None}))
    return tuple(dict.fromkeys((prompt_variant(point), unmerged)))


def require_trained(point: OperatingPoint, known: Collection[str]) -> None:
    """Raise ModelError, which names the point, where none of the ways that will do for it is known."""
    if not any(way in known for way in prompt_variants(point)):
        raise ModelError(
            f"operating point {point.name!r}: {prompt_variants(point)[0]!r} is not trained for these tasks; "
            f"the weights have: {', '.join(known)}"
        )


def fallback_order(point: OperatingPoint) -> tuple[str, ...]:
    """Name the ways that a task runs at a point, the best first: the first that it has, of which the last is sure."""
    return tuple(dict.fromkeys((*prompt_variants(point), PLAIN)))


def prompt_counts(points: Iterable[OperatingPoint]) -> dict[str, int]:
    """Prompts in each layer, of every way that tasks may run at some points."""
    counted = {
        each: point.prompts.count if point.prompts else 0
        for point in points
        for each in prompt_variants(point)
        if each != PLAIN
    }
    return {PLAIN: 0} | counted


def _merged(merging: TokenMerging | None) -> str:
    if merging is None or not any(merging.schedule):
        return ""
    return "-".join(["merge", ".".join(map(str, merging.schedule)), *([merging.rule] if merging.rule else [])])
