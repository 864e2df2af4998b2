"""What is told of a search for points: each form with what was measured, and why it is kept or is not."""

from collections.abc import Iterator

from trimtab.tuning.precisions import untried, why_not_faster
from trimtab.tuning.search import SearchContext, SearchResult
from trimtab.tuning.selection import Trial, metric_name
from trimtab_pipelines.accuracy_evidence import AGREEMENT
from trimtab_pipelines.stages import Stage

COLUMNS = ("95 % interval", "certain", "ms a row", "times as fast", "")


def table_columns(found: SearchResult) -> tuple[str, ...]:
    """The heads of the table."""
    return ("point", metric_name(found.trials[0].accuracy), *COLUMNS)


def rows(found: SearchResult, seconds: float) -> Iterator[tuple[str, ...]]:
    """A line for each form that was timed; `seconds`: how long trials might take."""
    yield from (_row(trial, found) for trial in found.trials)
    out_of_time = dict.fromkeys(found.plain.unjudged, f"not judged in time; --seconds is {seconds:g}")
    for name, why in (*found.plain.slow.items(), *out_of_time.items()):
        yield (name, "", "", "", f"{1000 * found.row_seconds[name]:.2f}", f"{found.speed_up(name):.2f}", why)


def excluded(ground: SearchContext, found: SearchResult) -> Iterator[str]:
    """Say why there are no points in a precision, or compiled."""
    for precision, why in untried(ground.machine).items():
        yield f"{precision} is {why}"
    for precision, ratio in found.plain.slow_precisions.items():
        yield f"no point in {precision} is kept: {why_not_faster(precision, ratio, ground.machine)}"
    for name, why in found.compilations.refused.items():
        yield f"{name} is not compiled: {why}"
    if ground.uncompiled:
        yield f"no point is compiled: {ground.uncompiled}"


def unlabelled(stage: Stage, variant: str) -> str:
    """What is told instead of accuracies, and what that is not fit for."""
    others = [other.name for other in stage.variants if other.name != variant]
    beside = f"; plans will hold it against the accuracies of {', '.join(others)}" if others else ""
    return f"no right answers: forms are judged by {AGREEMENT}, which is no accuracy{beside}"


def figures(ground: SearchContext, found: SearchResult) -> dict[str, float]:
    """How many forms were tried, and how good and how fast each point is that is kept."""
    kept, named = found.choice.kept, metric_name(found.trials[0].accuracy)
    unjudged = len(found.plain.unjudged)
    tally = {
        "tried": found.tried,
        "unjudged": unjudged,
        "untimed": len(ground.points) - found.tried - unjudged,
        "compiled": len(found.compilations.trials),
        "kept": len(kept),
        "samples": kept[0].accuracy.samples or 0,
    }
    good = {f"{trial.point.name}_{named}": trial.accuracy.value for trial in kept}
    return tally | good | {f"{one.point.name}_speed_up": round(found.speed_up(one.point.name), 3) for one in kept}


def _row(trial: Trial, found: SearchResult) -> tuple[str, ...]:
    accuracy = trial.accuracy
    return (
        trial.point.name,
        f"{accuracy.value:.4f}",
        f"{accuracy.low:.4f} – {accuracy.high:.4f}",
        "" if accuracy.mean_confidence is None else f"{accuracy.mean_confidence:.4f}",
        f"{1000 * trial.row_seconds:.2f}",
        f"{found.speed_up(trial.point.name):.2f}",
        found.choice.refused.get(trial.point.name, "kept"),
    )
