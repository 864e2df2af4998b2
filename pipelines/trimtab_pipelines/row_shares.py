"""Row shares: the variants that answer the rows of a stage, as a plan expects or as a router measured them."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from trimtab_pipelines.escalation import Key

MIN_SHOWN_SHARE = 0.005
"""Smaller shares are not described."""
Escalated = Mapping[tuple[Key, Key], float]
"""Rows that were served again, by their first and their second point."""


class AnsweredBy(NamedTuple):
    """The point that answers a row, and whether it served the row again."""

    variant: str
    operating_point: str
    escalated: bool = False


Rows = Mapping[AnsweredBy, float]
"""Numbers of rows, or their shares."""


def answered_rows(served: Mapping[Key, float], escalated: Escalated) -> dict[AnsweredBy, float]:
    """Rows by the point that answered them. `served` counts an escalated row at both of its points."""
    rows: defaultdict[AnsweredBy, float] = defaultdict(float)
    for key, count in served.items():
        rows[AnsweredBy(*key)] += count
    for (first, second), count in escalated.items():
        rows[AnsweredBy(*first)] -= count
        rows[AnsweredBy(*second)] -= count
        rows[AnsweredBy(*second, escalated=True)] += count
    return {answered_by: count for answered_by, count in rows.items() if count > 0}


def mixed_rows(lighter: Rows, heavier: Rows, share: float) -> dict[AnsweredBy, float]:
    """Shares of the rows if the heavier of two options serves this share of them."""
    rows = Counter({key: (1.0 - share) * part for key, part in lighter.items()})
    rows.update({key: share * part for key, part in heavier.items()})
    return dict(rows)


def describe_point(variant: str, point: str) -> str:
    return variant if point == "default" else f"{variant}/{point}"


def describe_answer(answered_by: AnsweredBy) -> str:
    """A phrase such as `read-m`, or `escalated to read-xl`."""
    name = describe_point(answered_by.variant, answered_by.operating_point)
    return f"escalated to {name}" if answered_by.escalated else name


def escalation_rate(rows: Rows) -> float:
    """Share of the rows that a second point answered; 0 without rows."""
    total = sum(rows.values())
    return sum(count for answered_by, count in rows.items() if answered_by.escalated) / total if total else 0.0


def have_several_points(expected: Rows, measured: Rows) -> bool:
    """Whether several points answer the rows of a stage, or should answer them; else there is nothing to compare."""
    return len({*expected, *measured}) > 1


def describe_shares(rows: Rows) -> str:
    """A phrase such as `85 % read-m, 15 % escalated to read-xl`; empty without rows."""
    total = sum(rows.values())
    shown = [(key, count / total) for key, count in rows.items() if count >= MIN_SHOWN_SHARE * total > 0]
    shown.sort(key=lambda item: (item[0].escalated, -item[1]))
    return ", ".join(f"{100 * share:.0f} % {describe_answer(key)}" for key, share in shown)
