"""Profile of an engine from results of `vllm bench serve --save-result`, AIPerf, GuideLLM or AIConfigurator."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from trimtab_pipelines.documents import DocumentError
from trimtab_pipelines.profile import ChatProfile, Measurement, ModelProfile, ModelProfileSpec
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.bench_formats import ESTIMATE_MARGIN, is_estimate, read_records
from trimtab_profiler.identity import this_machine
from trimtab_profiler.measurement_grid import GridPoint
from trimtab_profiler.profile import curve, point_profile

ESTIMATED = "trimtab.dev/estimated"
"""Annotation of a profile that is not measured: its source and margin."""


class BenchResult(BaseModel):
    """The fields of a result that a profile needs; times in milliseconds."""

    max_concurrency: int = Field(ge=1, le=4096)
    completed: int = Field(ge=1)
    failed: int = 0
    request_throughput: float = Field(gt=0)
    total_input_tokens: int = Field(ge=1)
    total_output_tokens: int = Field(ge=1)
    mean_ttft_ms: float = Field(gt=0)
    median_ttft_ms: float = Field(gt=0)
    p99_ttft_ms: float = Field(gt=0)
    mean_tpot_ms: float = Field(ge=0)
    median_tpot_ms: float = Field(ge=0)
    p99_tpot_ms: float = Field(ge=0)
    mean_e2el_ms: float | None = None
    median_e2el_ms: float | None = None
    p99_e2el_ms: float | None = None

    @property
    def output_tokens(self) -> float:
        return self.total_output_tokens / self.completed

    def first_token(self) -> Measurement:
        return self._measurement(self.mean_ttft_ms, self.median_ttft_ms, self.p99_ttft_ms)

    def whole(self) -> Measurement:
        """Time of whole responses; unless it is reported, the first token and the time of the others."""
        later = max(self.output_tokens - 1, 0.0)
        return self._measurement(
            self.mean_e2el_ms or self.mean_ttft_ms + later * self.mean_tpot_ms,
            self.median_e2el_ms or self.median_ttft_ms + later * self.median_tpot_ms,
            self.p99_e2el_ms or self.p99_ttft_ms + later * self.p99_tpot_ms,
        )

    def _measurement(self, mean_ms: float, median_ms: float, p99_ms: float) -> Measurement:
        return Measurement(
            batch_size=self.max_concurrency,
            latency_seconds_mean=mean_ms / 1000,
            latency_seconds_p50=median_ms / 1000,
            latency_seconds_p99=p99_ms / 1000,
            throughput_rps=self.request_throughput,
            batches=max(self.completed // self.max_concurrency, 1),
        )


def read_results(files: Iterable[Path]) -> list[BenchResult]:
    """Results by concurrency; raises DocumentError for a file that is none, or has failed requests."""
    results: dict[int, BenchResult] = {}
    for file, result in [(path, read) for path in files for read in _read_file(path)]:
        if result.failed:
            raise DocumentError(f"{file}: {result.failed} requests failed; measure again")
        if result.max_concurrency in results:
            raise DocumentError(f"{file}: another result has max_concurrency {result.max_concurrency} too")
        results[result.max_concurrency] = result
    return [results[concurrency] for concurrency in sorted(results)]


def _read_file(file: Path) -> list[BenchResult]:
    try:
        return [BenchResult.model_validate(record) for record in read_records(file.read_text())]
    except OSError as error:
        raise DocumentError(f"{file}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        message = f"{file}: {field}: {first['msg']}; give results of vllm bench serve with --max-concurrency"
        raise DocumentError(message) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{file}: no result of vllm bench serve, AIPerf, GuideLLM or AIConfigurator is read ({error})"
        raise DocumentError(message) from error


def bench_profiles(pipeline: InferencePipeline, files: Iterable[Path]) -> dict[str, ModelProfile]:
    """Profile of a pipeline's only engine; raises DocumentError. Chats with images count like those without."""
    files = list(files)
    engines = [(stage, v) for stage in pipeline.spec.stages for v in stage.variants if v.forwards_chats]
    if len(engines) != 1:
        raise DocumentError(f"{pipeline.name} has {len(engines)} variants with an engine; results are those of one")
    ((stage, variant),), results = engines, read_results(files)
    cores, sizes = variant.resources.cpu, tuple(result.max_concurrency for result in results)
    first, whole = curve([r.first_token() for r in results], cores), [r.whole() for r in results]
    single = results[0]
    chats = ChatProfile(
        time_to_first_token=first,
        text_only=curve(whole, cores),
        text_only_time_to_first_token=first,
        tokens=max(single.output_tokens, 1.0),
        prompt_tokens=single.total_input_tokens / single.completed,
        text_prompt_tokens=single.total_input_tokens / single.completed,
    )
    point = point_profile(GridPoint(variant.name, variant.points[0].name, 1, (cores,), sizes), cores, whole)
    spec = ModelProfileSpec(
        pipeline=pipeline.name,
        stage=stage.name,
        hardware=this_machine(),
        points=(point.replace(chats=chats),),
    )
    estimated = any(is_estimate(file.read_text()) for file in files)
    annotations = {ESTIMATED: f"AIConfigurator, times {ESTIMATE_MARGIN:g}"} if estimated else {}
    metadata = Metadata(name=f"{pipeline.name}-{stage.name}"[:63].rstrip("-"), annotations=annotations)
    return {stage.name: ModelProfile(metadata=metadata, spec=spec)}
