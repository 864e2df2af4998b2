"""Output of a search for operating points: a table of all points, messages and figures."""

from collections.abc import Iterator

from trimtab.tuning.precisions import why_not_faster, why_not_tried
from trimtab.tuning.search import SearchContext, SearchResult
from trimtab.tuning.selection import Trial, metric_name
from trimtab_pipelines.accuracy_evidence import AGREEMENT
from trimtab_pipelines.stages import Stage

COLUMNS = ("95 % interval", "confidence", "ms per row", "speed-up", "decision")


def table_columns(result: SearchResult) -> tuple[str, ...]:
    return ("point", metric_name(result.trials[0].accuracy), *COLUMNS)


def table_rows(result: SearchResult, seconds: float) -> Iterator[tuple[str, ...]]:
    """Yield a row for each timed point; `seconds` is the time budget."""
    yield from (_row(trial, result) for trial in result.trials)
    out_of_time = dict.fromkeys(result.results.unevaluated, f"not evaluated within --seconds {seconds:g}")
    for name, reason in (*result.results.slow.items(), *out_of_time.items()):
        yield (name, "", "", "", f"{1000 * result.row_seconds[name]:.2f}", f"{result.speed_up(name):.2f}", reason)


def exclusion_messages(context: SearchContext, result: SearchResult) -> Iterator[str]:
    """Yield the reasons why precisions were not tried or selected, and why points are not compiled."""
    for precision, reason in why_not_tried(context.machine).items():
        yield f"{precision} not tried: {reason}"
    for precision, ratio in result.results.slow_precisions.items():
        yield f"{precision} rejected: {why_not_faster(precision, ratio, context.machine)}"
    for name, reason in result.compilations.rejected.items():
        yield f"{name} not compiled: {reason}"
    if context.why_uncompiled:
        yield f"no point compiled: {context.why_uncompiled}"


def unlabelled_message(stage: Stage, variant: str) -> str:
    others = [other.name for other in stage.variants if other.name != variant]
    comparison = f"; plans compare it with the accuracies of {', '.join(others)}" if others else ""
    return f"no labels: points are evaluated by {AGREEMENT}, which is not an accuracy{comparison}"


def result_figures(context: SearchContext, result: SearchResult) -> dict[str, float]:
    """Return the figures of the result line."""
    selected, metric = result.selection.selected, metric_name(result.trials[0].accuracy)
    unevaluated = len(result.results.unevaluated)
    figures: dict[str, float] = {
        "tried": result.tried,
        "unevaluated": unevaluated,
        "untimed": len(context.points) - result.tried - unevaluated,
        "compiled": len(result.compilations.trials),
        "selected": len(selected),
        "samples": selected[0].accuracy.samples or 0,
    }
    figures |= {f"{trial.point.name}_{metric}": trial.accuracy.value for trial in selected}
    return figures | {f"{trial.point.name}_speed_up": round(result.speed_up(trial.point.name), 3) for trial in selected}


def _row(trial: Trial, result: SearchResult) -> tuple[str, ...]:
    accuracy = trial.accuracy
    return (
        trial.point.name,
        f"{accuracy.value:.4f}",
        f"{accuracy.low:.4f} – {accuracy.high:.4f}",
        "" if accuracy.mean_confidence is None else f"{accuracy.mean_confidence:.4f}",
        f"{1000 * trial.row_seconds:.2f}",
        f"{result.speed_up(trial.point.name):.2f}",
        result.selection.rejected.get(trial.point.name, "selected"),
    )
