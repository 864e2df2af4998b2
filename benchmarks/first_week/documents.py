"""Invalid documents: each is rejected, or warned about, by name."""

from pathlib import Path

from benchmarks.first_week.checking import Check, Seen, require
from benchmarks.first_week.stranger import a_pipeline, trimtab


def refuses(before: str, after: str, complaint: str) -> "Check":
    """A pipeline in which something is written otherwise is refused with this complaint."""

    def run(folder: Path) -> Seen:
        path = a_pipeline(folder)
        text = path.read_text()
        require(before in text, f"{before!r} is not in the pipeline")
        path.write_text(text.replace(before, after, 1))
        done = trimtab("plan", str(path), "--load", "1")
        require(done.code == 2, f"exit code {done.code}, not 2: {done.errors}")
        require(complaint in done.errors, done.errors)
        return Seen(done.errors.strip())

    return Check("documents", f"{after.strip()!r} is refused", run)


def other_weights(folder: Path) -> Seen:
    """A profile of other weights is not trusted, and the line says so."""
    path = a_pipeline(folder)
    done = trimtab("profile", str(path), "--quick")
    require(done.code == 0, done.errors)
    trusted = trimtab("plan", str(path), "--load", "5")
    require("measured on this kind of machine" in trusted.output, trusted.output + trusted.errors)
    path.write_text(path.read_text().replace("random://?seed=0", "random://?seed=1", 1))
    asked = trimtab("plan", str(path), "--load", "5", "--profiles", str(folder / "profile.yaml"))
    require("variant echo of stage first was measured with other weights" in asked.output, asked.output + asked.errors)
    return Seen("told which variant was measured with other weights")


CHECKS = (
    refuses("latency: 2s", "latency: 400", "spec.slo.latency: 400 has no unit; write 400ms or 400s"),
    refuses("apiVersion: trimtab.dev/v1alpha1", "apiVersion: trimtab.dev/v2", "apiVersion: Input should be"),
    refuses("  slo:\n", "  mode: Auto\n  mode: Auto\n  slo:\n", "stands twice"),
    refuses("  budget:\n", "  budgets: {}\n  budget:\n", "budgets: unknown field"),
    Check("documents", "a profile of other weights is told", other_weights),
)
