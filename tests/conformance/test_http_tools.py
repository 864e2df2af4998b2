"""curl and vegeta: HTTP/1.1 and HTTP/2, the latter without TLS by prior knowledge (h2c)."""

import base64
import json
import struct
from pathlib import Path

import pytest

from tests.conformance.installed import go_program, run, system_program
from tests.conformance.target import EXPECTED, PATIENCE_SECONDS, ROW, Target, check, check_rest, rest_request

pytestmark = pytest.mark.conformance

RATE_RPS, SECONDS = 50, 2


def curl(target: Target, *options: str | Path, body: bytes = b"") -> str:
    """Post a body, without the user's settings and without a proxy; returns what is printed."""
    security = ["--cacert", str(target.ca)] if target.ca else []
    headers = [word for name, value in target.headers.items() for word in ("-H", f"{name}: {value}")]
    quietly = ["-q", "--silent", "--show-error", "--fail-with-body", "--noproxy", "*"]
    command = [system_program("curl"), *quietly, "--max-time", f"{PATIENCE_SECONDS:g}", *security, *headers]
    return run([*command, *options, "--data-binary", "@-", target.infer_url], body)


@pytest.mark.parametrize("version", ["1.1", "2"])
def test_curl(target: Target, version: str) -> None:
    protocol = {"1.1": "--http1.1", "2": "--http2" if target.ca else "--http2-prior-knowledge"}[version]
    if version == "2" and "HTTP2" not in run([system_program("curl"), "--version"]):
        pytest.skip("this curl was built without HTTP/2")

    form = ("-H", "Content-Type: application/json", "--write-out", "\n%{http_version}")
    body, _, answered_version = curl(target, protocol, *form, body=rest_request().encode()).rpartition("\n")

    check_rest(body)
    assert answered_version == version


def test_curl_with_binary_tensors(target: Target, tmp_path: Path) -> None:
    raw = struct.pack(f"<{len(ROW)}f", *ROW)
    size = {"binary_data_size": len(raw)}
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, len(ROW)], "parameters": size}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = ("-H", f"Inference-Header-Content-Length: {len(header)}")

    curl(target, *length, "-H", "Content-Type: application/octet-stream", "-o", tmp_path / "answer", body=header + raw)

    check(struct.unpack(f"<{len(EXPECTED)}f", (tmp_path / "answer").read_bytes()[-len(raw) :]))


def test_curl_with_a_chunked_body(target: Target) -> None:
    check_rest(curl(target, "-H", "Transfer-Encoding: chunked", body=rest_request().encode()))


@pytest.mark.parametrize("version", ["1.1", "2"])
def test_vegeta(target: Target, version: str, tmp_path: Path) -> None:
    protocol = {"1.1": "-http2=false", "2": "-http2=true" if target.ca else "-h2c"}[version]
    security = ["-root-certs", str(target.ca)] if target.ca else []
    request = {
        "method": "POST",
        "url": target.infer_url,
        "body": base64.b64encode(rest_request().encode()).decode(),
        "header": {name: [value] for name, value in {**target.headers, "Content-Type": "application/json"}.items()},
    }
    results = str(tmp_path / "results")
    load = [f"-rate={RATE_RPS}", f"-duration={SECONDS}s", f"-timeout={PATIENCE_SECONDS:g}s", "-format=json"]
    command = [go_program("vegeta"), "attack", *load, protocol, *security, f"-output={results}"]
    run(command, json.dumps(request).encode() + b"\n")
    answers = [json.loads(line) for line in run([go_program("vegeta"), "encode", "-to=json", results]).splitlines()]

    assert [answer["code"] for answer in answers] == [200] * RATE_RPS * SECONDS
    for answer in answers:
        check_rest(base64.b64decode(answer["body"]))
