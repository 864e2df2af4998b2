"""Clients that need a runtime or an environment of their own: node's gRPC, and KServe's Python SDK."""

import json
import tempfile
from pathlib import Path

from benchmarks.clients.protoset import write_protoset
from benchmarks.clients.target import (
    PATIENCE_SECONDS,
    QUESTION,
    Target,
    WrongAnswerError,
    check,
    grpc_question,
)
from benchmarks.clients.tools import installed, output_of, system_program
from trimtab_protocol.grpc_messages import SERVICE

HERE = Path(__file__).parent


def node_grpc(target: Target) -> str:
    """Ask by @grpc/grpc-js: what a web server in front of a pipeline would use."""
    modules = installed("node")
    with tempfile.TemporaryDirectory(prefix="trimtab-clients-") as folder:
        order = _order(target) | {
            "modules": str(modules),
            "descriptors": write_protoset(Path(folder)),
            "service": SERVICE,
            "question": json.loads(grpc_question(target.model)),
        }
        answer = json.loads(output_of([system_program("node"), str(HERE / "node_client.cjs")], _encoded(order)))
    check(answer["numbers"])
    if answer["live"] is not True or answer["unknown"] != "NOT_FOUND":
        raise WrongAnswerError(f"live is {answer['live']}, and another model's code {answer['unknown']}, not NOT_FOUND")
    return "live, answered right, another model NOT_FOUND"


def kserve_rest(target: Target) -> str:
    """Ask by KServe's InferenceRESTClient."""
    return _kserve(target, "rest")


def kserve_grpc(target: Target) -> str:
    """Ask by KServe's InferenceGRPCClient."""
    return _kserve(target, "grpc")


def _kserve(target: Target, protocol: str) -> str:
    python = installed("kserve") / "bin" / "python"
    order = _order(target) | {"protocol": protocol, "base_url": target.base_url, "question": list(QUESTION)}
    answer = json.loads(output_of([str(python), str(HERE / "kserve_client.py")], _encoded(order)).splitlines()[-1])
    check(answer["numbers"])
    if not (answer["live"] and answer["ready"]):
        raise WrongAnswerError(f"live is {answer['live']}, ready is {answer['ready']}")
    return "live, ready, answered right"


def _order(target: Target) -> dict[str, object]:
    return {
        "address": target.grpc,
        "model": target.model,
        "ca": str(target.ca) if target.ca else None,
        "headers": dict(target.headers),
        "patience_seconds": PATIENCE_SECONDS,
    }


def _encoded(order: dict[str, object]) -> bytes:
    return json.dumps(order).encode()
