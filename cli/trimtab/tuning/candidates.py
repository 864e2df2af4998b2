"""Candidate points of a vision transformer, by its number of tokens and layers."""

from collections.abc import Iterator, Sequence

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


def candidate_points(
    patches: int, depth: int, rules: Sequence[str], precisions: Sequence[Precision]
) -> list[OperatingPoint]:
    """Return the points to try, the full model first.

    Args:
        patches: number of tokens of an image.
        depth: number of layers.
        rules: merge rules; the first for all rates, the others for strong ones.
        precisions: precisions other than that of the weights.
    """
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
    return point.model_copy(update={"name": f"{point.name}-{precision.lower()}", "precision": precision})
