"""grpcurl and ghz: by reflection, and by descriptors they are given."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.clients.protoset import write_protoset
from benchmarks.clients.target import PATIENCE_SECONDS, Target, WrongAnswerError, check_grpc, grpc_question
from benchmarks.clients.tools import output_of, program
from trimtab_protocol.grpc_messages import METHODS, SERVICE

HEALTH = "grpc.health.v1.Health"
CALLS = 200
INVENTED = "ServerFlies"


def grpcurl_by_reflection(target: Target) -> str:
    """List the services, describe one, and call it, knowing nothing before."""
    services = output_of([*_grpcurl(target), target.grpc, "list"]).split()
    if SERVICE not in services:
        raise WrongAnswerError(f"reflection lists {services}, and not {SERVICE}")
    described = output_of([*_grpcurl(target), target.grpc, "list", SERVICE]).split()
    missing = {f"{SERVICE}.{method}" for method in METHODS} - set(described)
    if missing:
        raise WrongAnswerError(f"reflection describes {SERVICE} without {', '.join(sorted(missing))}")
    check_grpc(_infer_by_grpcurl(target, []))
    return f"{len(services)} services listed, answered right"


def grpcurl_by_descriptors(target: Target) -> str:
    """Call it by descriptors in a file, without reflection."""
    with tempfile.TemporaryDirectory(prefix="trimtab-clients-") as folder:
        check_grpc(_infer_by_grpcurl(target, ["-protoset", write_protoset(Path(folder))]))
    return "answered right"


def grpcurl_health(target: Target) -> str:
    """Ask the standard health service, as Kubernetes and load balancers do."""
    answer = json.loads(output_of([*_grpcurl(target), target.grpc, f"{HEALTH}/Check"]))
    if answer.get("status") != "SERVING":
        raise WrongAnswerError(f"the health service answers {answer}; right is SERVING")
    return "SERVING"


def grpcurl_unknown_method(target: Target) -> str:
    """Call what does not exist: UNIMPLEMENTED at once, not silence until the caller gives up."""
    with tempfile.TemporaryDirectory(prefix="trimtab-clients-") as folder:
        known_by = ["-protoset", write_protoset(Path(folder), [INVENTED])]
        command = [*_grpcurl(target), *known_by, target.grpc, f"{SERVICE}/{INVENTED}"]
        output_of(command, codes=[_GRPCURL_CODES + _UNIMPLEMENTED])
    return "UNIMPLEMENTED"


def ghz_by_reflection(target: Target) -> str:
    """Many calls over several connections."""
    metadata = ["--reflect-metadata", json.dumps(dict(target.headers))] if target.headers else []
    return _load_by_ghz(target, metadata)


def ghz_by_descriptors(target: Target) -> str:
    """The same by descriptors in a file."""
    with tempfile.TemporaryDirectory(prefix="trimtab-clients-") as folder:
        return _load_by_ghz(target, ["--protoset", write_protoset(Path(folder))])


_UNIMPLEMENTED = 12
_GRPCURL_CODES = 64
"""grpcurl's exit code is the call's status plus this."""


def _grpcurl(target: Target) -> list[str]:
    security = ["-cacert", str(target.ca)] if target.ca else ["-plaintext"]
    headers = [word for name, value in target.headers.items() for word in ("-H", f"{name}: {value}")]
    return [program("grpcurl"), *security, *headers, "-max-time", f"{PATIENCE_SECONDS:g}"]


def _infer_by_grpcurl(target: Target, known_by: list[str]) -> str:
    command = [*_grpcurl(target), *known_by, "-d", "@", target.grpc, f"{SERVICE}/ModelInfer"]
    return output_of(command, grpc_question(target.model).encode())


def _load_by_ghz(target: Target, known_by: list[str]) -> str:
    security = ["--cacert", str(target.ca)] if target.ca else ["--insecure"]
    metadata = ["--metadata", json.dumps(dict(target.headers))] if target.headers else []
    load = ["--total", str(CALLS), "--concurrency", "8", "--connections", "4", "--timeout", f"{PATIENCE_SECONDS:g}s"]
    call = ["--call", f"{SERVICE}/ModelInfer", "--data", grpc_question(target.model), "--format", "json"]
    report = json.loads(output_of([program("ghz"), *security, *metadata, *known_by, *load, *call, target.grpc]))
    if report["statusCodeDistribution"] != {"OK": CALLS}:
        raise WrongAnswerError(
            f"of {CALLS} calls {report['statusCodeDistribution']}: {report.get('errorDistribution')}"
        )
    return f"{CALLS} of {CALLS} OK over 4 connections"


GRPC_TOOLS: dict[str, Callable[[Target], str]] = {
    "grpcurl_reflection": grpcurl_by_reflection,
    "grpcurl_descriptors": grpcurl_by_descriptors,
    "grpcurl_health": grpcurl_health,
    "grpcurl_unknown_method": grpcurl_unknown_method,
    "ghz_reflection": ghz_by_reflection,
    "ghz_descriptors": ghz_by_descriptors,
}
