"""OpenTelemetry spans of requests and stages.

Spans are written after a request has been answered, from times that are measured anyway, so that tracing does not delay
it. Without OTEL_EXPORTER_OTLP_ENDPOINT there is no tracer, and trace headers are only forwarded.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry.propagate import extract
from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context

from trimtab_pipelines.request_outcome import FAILED, RequestOutcome
from trimtab_router.refusal import Refusal
from trimtab_router.scheduling.stage_request import ServedRows

log = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
DEFAULT_PORT = 4317


def collector_address(endpoint: str | None) -> str | None:
    if not endpoint:
        return None
    url = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    return f"{url.hostname}:{url.port or DEFAULT_PORT}"


def create_tracer(pipeline: str) -> Tracer | None:
    if not os.environ.get(ENDPOINT_VARIABLE):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - an extra
    except ImportError:
        log.warning("%s is set, but trimtab[router] is not installed: no spans", ENDPOINT_VARIABLE)
        return None
    provider = TracerProvider(resource=Resource.create({"service.name": f"trimtab-router-{pipeline}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("trimtab_router")


def record_request(
    tracer: Tracer,
    trace_parent: str,
    arrived_at: float,
    outcome: RequestOutcome,
    stages: Mapping[str, Sequence[ServedRows]],
    refusal: Refusal | None = None,
) -> None:
    """Write the span of a finished request, an error unless the client is the cause, and one for each stage.

    Times are in monotonic seconds, read after the wall clock, so that a pause between both readings moves no span past
    its end.
    """
    ended_at, now = time.time_ns(), time.monotonic()
    context = extract({"traceparent": trace_parent}) if trace_parent else None
    span = tracer.start_span(
        "infer", context, kind=SpanKind.SERVER, start_time=ended_at - int((now - arrived_at) * 1e9)
    )
    span.set_attribute("trimtab.outcome", outcome.word)
    if refusal is not None:
        span.set_attribute("trimtab.reason", refusal.reason)
        if refusal.stage:
            span.set_attribute("trimtab.stage", refusal.stage)
    if outcome is FAILED or (refusal is not None and not refusal.client_error):
        span.set_status(StatusCode.ERROR, refusal.message if refusal else None)
    for stage, results in stages.items():
        for rows in results:
            started_at = ended_at - int((now - rows.dispatched_at) * 1e9)
            child = tracer.start_span(
                f"stage {stage}",
                set_span_in_context(span),
                kind=SpanKind.CLIENT,
                start_time=started_at,
                attributes={
                    "trimtab.variant": rows.variant,
                    "trimtab.operating_point": rows.operating_point,
                    "trimtab.batch_size": rows.batch_rows,
                    "trimtab.queue_seconds": rows.queue_seconds,
                },
            )
            child.end(started_at + int(rows.service_seconds * 1e9))
    span.end(ended_at)
