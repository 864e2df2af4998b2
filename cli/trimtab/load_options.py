"""Load and proxy options, parsed and validated before any process starts."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trimtab.local.load_process import LoadOptions
from trimtab.options import LoadArguments
from trimtab_loadtester.attack import ClientProtocol
from trimtab_loadtester.load_spec import LoadError
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_loadtester.payloads.sources import require_chats
from trimtab_pipelines.documents import load_edge
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.synthetic_inputs import LMM_DIGITS, PAYLOADS_ANNOTATION, payload_kind, payloads_of

EdgeOption = Annotated[Path | None, typer.Option("--edge", help="Settings of Envoy: TLS, API keys, JWT, rate limits")]
NoProxyOption = Annotated[bool, typer.Option("--no-proxy", help="Serve plain REST without Envoy")]


def check_load(load: LoadOptions | None, edge: Path | None) -> None:
    """Raise LoadError if the proxy would reject the load for lack of TLS or keys; DocumentError if it is invalid."""
    settings = load_edge(edge)
    if load is not None and (settings.tls is not None or settings.authenticates):
        raise LoadError(
            f"--load: {edge} requires TLS or keys, which --load does not send; start without --load, then run "
            "`trimtab loadtest` with --ca and --api-key-file"
        )


def check_chats(pipeline: InferencePipeline, load: LoadOptions | None) -> None:
    """Raise LoadError if the load specifies images per chat and the payloads have no chats with that many."""
    if load is not None and load.spec().traffic is not None:
        require_chats(pipeline, load.load or "", load.samples)


def check_samples(pipeline: InferencePipeline, samples: str | None) -> None:
    """Raise SamplesError if the samples cannot be read."""
    if samples is not None:
        LabelledPayloads(pipeline, samples).payload(0)


def default_client(pipeline: InferencePipeline, samples: str | None) -> ClientProtocol:
    """Return `chat` for a chat pipeline, else `REST`; raises LoadError if a chat pipeline names no payloads."""
    if pipeline.spec.chat_settings is None:
        return "REST"
    if samples is None and payload_kind(payloads_of(pipeline)) != LMM_DIGITS:
        raise LoadError(
            f"{pipeline.name} serves chats, and its annotation {PAYLOADS_ANNOTATION} names no chats to send: set it to "
            f"{LMM_DIGITS}, or give --samples with `messages` and `images`"
        )
    return "chat"


def absolute_samples(samples: str | None) -> str | None:
    """Make the path of a samples folder or file absolute: the load's process may have another working directory."""
    return str(Path(samples).resolve()) if samples is not None and Path(samples).exists() else samples


def parse_load_options(
    arguments: LoadArguments, *, samples: str | None = None, protocol: ClientProtocol = "REST"
) -> LoadOptions | None:
    """Validate the load options; None without --load and --trace. Raises LoadError or TraceError."""
    if arguments.load is not None and arguments.trace is not None:
        raise LoadError("give --load or --trace, not both")
    if arguments.load is None and arguments.trace is None:
        if samples is not None:
            raise LoadError("--samples needs a load: give --load or --trace too")
        return None
    sent = {"samples": absolute_samples(samples), "protocol": protocol}
    load = LoadOptions(**asdict(arguments) | sent)
    load.spec().rates(load.duration_seconds)
    return load
