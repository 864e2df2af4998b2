"""grpcurl and ghz: by reflection, and by descriptors that they are given."""

import json
from pathlib import Path

import pytest

from tests.conformance.installed import go_program, run
from tests.conformance.target import PATIENCE_SECONDS, UNKNOWN_METHOD, Target, check_grpc, grpc_request, write_protoset
from tests.local_run import until
from trimtab_protocol.grpc_messages import METHODS, SERVICE

pytestmark = pytest.mark.conformance

CALLS = 200
EXIT_CODE_UNIMPLEMENTED = 64 + 12
"""grpcurl's exit code is 64 plus the status."""


def grpcurl(target: Target, *arguments: str, message: str = "", codes: tuple[int, ...] = (0,)) -> str:
    security = ["-cacert", str(target.ca)] if target.ca else ["-plaintext"]
    headers = [word for name, value in target.headers.items() for word in ("-H", f"{name}: {value}")]
    command = [go_program("grpcurl"), *security, *headers, "-max-time", f"{PATIENCE_SECONDS:g}", *arguments]
    return run(command, message.encode(), codes)


def test_grpcurl_by_reflection(target: Target) -> None:
    assert SERVICE in grpcurl(target, target.grpc, "list").split()
    assert {f"{SERVICE}.{method}" for method in METHODS} <= set(grpcurl(target, target.grpc, "list", SERVICE).split())
    infer = ("-d", "@", target.grpc, f"{SERVICE}/ModelInfer")
    check_grpc(grpcurl(target, *infer, message=json.dumps(grpc_request(target.model))))


def test_grpcurl_by_descriptors(target: Target, tmp_path: Path) -> None:
    infer = ("-protoset", write_protoset(tmp_path), "-d", "@", target.grpc, f"{SERVICE}/ModelInfer")
    check_grpc(grpcurl(target, *infer, message=json.dumps(grpc_request(target.model))))


def test_grpcurl_asks_for_health(target: Target) -> None:
    """The service follows the router's readiness with some delay."""
    health = (target.grpc, "grpc.health.v1.Health/Check")
    until(lambda: json.loads(grpcurl(target, *health)) == {"status": "SERVING"}, "the service is healthy", 20)


def test_grpcurl_calls_an_unknown_method(target: Target, tmp_path: Path) -> None:
    """The status is immediate, not a timeout."""
    unknown = ("-protoset", write_protoset(tmp_path), target.grpc, f"{SERVICE}/{UNKNOWN_METHOD}")
    grpcurl(target, *unknown, codes=(EXIT_CODE_UNIMPLEMENTED,))


@pytest.mark.parametrize("reflection", [True, False], ids=["by-reflection", "by-descriptors"])
def test_ghz(target: Target, *, reflection: bool, tmp_path: Path) -> None:
    """Many calls over several connections."""
    metadata = json.dumps(dict(target.headers))
    security = ["--cacert", str(target.ca)] if target.ca else ["--insecure"]
    described = ["--reflect-metadata", metadata] if reflection else ["--protoset", write_protoset(tmp_path)]
    load = ["--total", str(CALLS), "--concurrency", "8", "--connections", "4", "--timeout", f"{PATIENCE_SECONDS:g}s"]
    call = ["--call", f"{SERVICE}/ModelInfer", "--data", json.dumps(grpc_request(target.model)), "--format", "json"]
    command = [go_program("ghz"), *security, "--metadata", metadata, *described, *load, *call, target.grpc]
    report = json.loads(run(command))

    assert report["statusCodeDistribution"] == {"OK": CALLS}, report.get("errorDistribution")
