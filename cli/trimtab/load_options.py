"""What options ask for, read and checked before anything starts: the load, its samples, the door."""

from pathlib import Path
from typing import TypedDict

from trimtab.local.load_process import LoadOptions
from trimtab_loadtester.attack import WireName
from trimtab_loadtester.load_spec import LoadError
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_loadtester.payloads.sources import require_chats
from trimtab_pipelines.documents import load_edge
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.synthetic_inputs import LMM_DIGITS, PAYLOADS_ANNOTATION, payload_kind, payloads_of


class ProxyOptions(TypedDict):
    """Of a Setup, the fields that say what stands before the router."""

    door: bool
    edge: Path | None


def door(edge: str | None) -> ProxyOptions:
    """Read --edge; raises DocumentError before anything starts."""
    if edge == "none":
        return {"door": False, "edge": None}
    load_edge(Path(edge) if edge else None)
    return {"door": True, "edge": Path(edge) if edge else None}


def check_load(order: LoadOptions | None, edge: Path | None) -> None:
    """Raise LoadError where a load is asked for that the door would turn away."""
    settings = load_edge(edge)
    if order is not None and (settings.tls is not None or settings.authenticates):
        raise LoadError(
            f"--load: the door of {edge} asks for TLS or keys, which this load does not bring; start without --load, "
            "then send it with `trimtab loadtest`, --ca and --api-key-file"
        )


def check_chats(pipeline: InferencePipeline, order: LoadOptions | None) -> None:
    """Raise LoadError where a load says how many images chats show, and there are none of so many to send."""
    if order is not None and order.spec().traffic is not None:
        require_chats(pipeline, order.text or "", order.samples)


def check_samples(pipeline: InferencePipeline, samples: str | None) -> None:
    """Raise SamplesError where samples cannot be used, before anything starts."""
    if samples is not None:
        LabelledPayloads(pipeline, samples).payload(0)


def default_client(pipeline: InferencePipeline, samples: str | None) -> WireName:
    """How a load is sent where nobody says how: chats as OpenAI's clients stream them, all else by REST.

    Raises:
        LoadError: the pipeline answers chats, and nothing says which chats to send.
    """
    if pipeline.spec.chat_settings is None:
        return "REST"
    if samples is None and payload_kind(payloads_of(pipeline)) != LMM_DIGITS:
        raise LoadError(
            f"{pipeline.name} answers chats, and its annotation {PAYLOADS_ANNOTATION} names none to send: write "
            f"{LMM_DIGITS} there, or give --samples with `messages` and `images`"
        )
    return "chat"


def located(samples: str | None) -> str | None:
    """Return samples in a folder or file by their whole path: who sends them may run elsewhere."""
    return str(Path(samples).resolve()) if samples is not None and Path(samples).exists() else samples


def parse_load_options(
    load: str | None,
    trace: Path | None,
    speed_up: float,
    scale: float,
    duration_seconds: float | None,
    seed: int,
    *,
    samples: str | None = None,
    wire: WireName = "REST",
) -> LoadOptions | None:
    """Read the load options; None where none is asked for. Raises LoadError or TraceError before anything starts."""
    if load is not None and trace is not None:
        raise LoadError("give --load or --trace, not both")
    if load is None and trace is None:
        if samples is not None:
            raise LoadError("--samples says what to send: give --load or --trace too")
        return None
    order = LoadOptions(load, trace, speed_up, scale, duration_seconds, seed, wire, samples=located(samples))
    order.spec().rates(duration_seconds)
    return order
