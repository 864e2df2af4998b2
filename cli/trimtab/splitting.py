"""How a request of many rows is split over operating points as cheaply as can be, told to a person. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from trimtab.plan_view import terminal_table
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.strategies import JobStrategies, Strategy
from trimtab_profiler.strategies import strategies_from

ROWS_SHOWN = 16
"""Of a request, where nobody says how many it has."""
MOST_SHOWN = 12
COLUMNS = ("variant", "cores", "expected accuracy", "ms", "rows by operating point")


def split_tables(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], rows: int) -> list[Table]:
    """What each floor costs, one table a stage; stages whose variants have one point each have none.

    Args:
        pipeline: the pipeline.
        profiles: by stage.
        rows: of the request, 1 to 64.
    """
    found: dict[str, list[tuple[str, ...]]] = {}
    for own in strategies_from(pipeline, profiles, rows):
        found.setdefault(own.stage, []).extend(_rows(own, rows))
    title = f"a request of {rows} rows: what no other split beats in both accuracy and time"
    return [terminal_table(COLUMNS, told, f"{stage}, {title}") for stage, told in found.items()]


def split_facts(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], rows: int) -> list[dict[str, Any]]:
    """The same as JSON has it, with every split."""
    return [
        {"stage": own.stage, "variant": own.variant, "cores": own.cores, **own.of(rows).model_dump(mode="json")}
        for own in strategies_from(pipeline, profiles, rows)
    ]


def _rows(own: JobStrategies, rows: int) -> Iterator[tuple[str, ...]]:
    for strategy in _spread(own.of(rows).strategies):
        split = ", ".join(f"{count} {way}" for way, count in strategy.rows.items())
        yield own.variant, f"{own.cores:g}", f"{strategy.accuracy:.4f}", f"{1000 * strategy.seconds:.2f}", split


def _spread(strategies: tuple[Strategy, ...]) -> list[Strategy]:
    """The first, the last, and some from between, as far apart from each other as can be."""
    last = len(strategies) - 1
    places = {round(last * step / (MOST_SHOWN - 1)) for step in range(MOST_SHOWN)}
    return [strategies[place] for place in sorted(places)]
