"""OpenTelemetry spans of requests and stages, when an endpoint for them is configured.

Spans are written once a request is answered, with the times that were measured anyway, so that tracing costs nothing
on the way. Without OTEL_EXPORTER_OTLP_ENDPOINT there is no tracer and trace headers are only passed on.
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


def collector(endpoint: str | None) -> str | None:
    """The HOST:PORT of an endpoint as the variable writes it; None without one."""
    if not endpoint:
        return None
    found = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    return f"{found.hostname}:{found.port or DEFAULT_PORT}"


def configured_tracer(pipeline: str) -> Tracer | None:
    """A tracer that exports to the configured endpoint; None without an endpoint or an exporter."""
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
    end: RequestOutcome,
    stages: Mapping[str, Sequence[ServedRows]],
    why: Refusal | None = None,
) -> None:
    """Write the span of a request that just ended, with a child for each stage that served it.

    Where it got no result, the span says in which stage and why. It is an error unless the caller alone is the cause.

    Its times are in monotonic seconds, read after the wall clock: a pause in between puts nothing past the end.
    """
    ended_at, now = time.time_ns(), time.monotonic()
    context = extract({"traceparent": trace_parent}) if trace_parent else None
    span = tracer.start_span(
        "infer", context, kind=SpanKind.SERVER, start_time=ended_at - int((now - arrived_at) * 1e9)
    )
    span.set_attribute("trimtab.outcome", end.word)
    if why is not None:
        span.set_attribute("trimtab.reason", why.reason)
        if why.stage:
            span.set_attribute("trimtab.stage", why.stage)
    if end is FAILED or (why is not None and not why.callers_fault):
        span.set_status(StatusCode.ERROR, why.message if why else None)
    for stage, pieces in stages.items():
        for piece in pieces:
            begun = ended_at - int((now - piece.departed_at) * 1e9)
            child = tracer.start_span(
                f"stage {stage}",
                set_span_in_context(span),
                kind=SpanKind.CLIENT,
                start_time=begun,
                attributes={
                    "trimtab.variant": piece.variant,
                    "trimtab.operating_point": piece.operating_point,
                    "trimtab.batch_size": piece.batch_rows,
                    "trimtab.queue_seconds": piece.queue_seconds,
                },
            )
            child.end(begun + int(piece.service_seconds * 1e9))
    span.end(ended_at)
