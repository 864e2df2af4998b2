"""curl and vegeta: HTTP/1.1 and HTTP/2, the latter without TLS by prior knowledge (h2c)."""

import base64
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.clients.target import (
    ANSWER,
    PATIENCE_SECONDS,
    QUESTION,
    Target,
    WrongAnswerError,
    check,
    check_rest,
    rest_question,
)
from benchmarks.clients.tools import AbsentError, output_of, program, system_program

RATE_RPS, SECONDS = 50, 2
HEADER_LENGTH = "Inference-Header-Content-Length"


def curl_1(target: Target) -> str:
    """JSON over HTTP/1.1."""
    return _ask_by_curl(target, "--http1.1", "1.1")


def curl_2(target: Target) -> str:
    """JSON over HTTP/2."""
    if "HTTP2" not in output_of([system_program("curl"), "--version"]):
        raise AbsentError("this curl was built without HTTP/2")
    return _ask_by_curl(target, "--http2" if target.ca else "--http2-prior-knowledge", "2")


def curl_binary(target: Target) -> str:
    """Tensors as bytes behind a JSON header, in both directions."""
    raw = struct.pack(f"<{len(QUESTION)}f", *QUESTION)
    size = {"binary_data_size": len(raw)}
    entry = {"name": "x", "datatype": "FP32", "shape": [1, len(QUESTION)], "parameters": size}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    with tempfile.TemporaryDirectory(prefix="trimtab-clients-") as folder:
        answer = Path(folder) / "answer"
        headers = ["-H", f"{HEADER_LENGTH}: {len(head)}", "-H", "Content-Type: application/octet-stream"]
        output_of([*_curl(target), *headers, "-o", str(answer), "--data-binary", "@-", target.infer_url], head + raw)
        body = answer.read_bytes()
    check(struct.unpack(f"<{len(ANSWER)}f", body[-len(raw) :]))
    return "answered right, as bytes"


def curl_chunked(target: Target) -> str:
    """A body that comes in chunks, its length not announced."""
    command = [*_curl(target), "-H", "Transfer-Encoding: chunked", "--data-binary", "@-", target.infer_url]
    check_rest(output_of(command, rest_question().encode()))
    return "answered right"


def vegeta_1(target: Target) -> str:
    """A steady rate over HTTP/1.1."""
    return _load_by_vegeta(target, ["-http2=false"])


def vegeta_2(target: Target) -> str:
    """A steady rate over HTTP/2: h2c without TLS, by ALPN with it."""
    return _load_by_vegeta(target, ["-http2=true"] if target.ca else ["-h2c"])


def _curl(target: Target) -> list[str]:
    security = ["--cacert", str(target.ca)] if target.ca else []
    headers = [word for name, value in target.headers.items() for word in ("-H", f"{name}: {value}")]
    # Without the user's own settings, and without a proxy between here and loopback.
    quietly = ["-q", "--silent", "--show-error", "--fail-with-body", "--noproxy", "*"]
    return [system_program("curl"), *quietly, "--max-time", f"{PATIENCE_SECONDS:g}", *security, *headers]


def _ask_by_curl(target: Target, option: str, version: str) -> str:
    form = ["-H", "Content-Type: application/json", "--data-binary", "@-", "--write-out", "\n%{http_version}"]
    printed = output_of([*_curl(target), option, *form, target.infer_url], rest_question().encode())
    body, _, spoken = printed.rpartition("\n")
    check_rest(body)
    if spoken != version:
        raise WrongAnswerError(f"it was answered over HTTP/{spoken}, and not over HTTP/{version}")
    return f"answered right over HTTP/{spoken}"


def _load_by_vegeta(target: Target, options: list[str]) -> str:
    security = ["-root-certs", str(target.ca)] if target.ca else []
    request = {
        "method": "POST",
        "url": target.infer_url,
        "body": base64.b64encode(rest_question().encode()).decode(),
        "header": {name: [value] for name, value in {**target.headers, "Content-Type": "application/json"}.items()},
    }
    with tempfile.TemporaryDirectory(prefix="trimtab-clients-") as folder:
        results = str(Path(folder) / "results")
        attack = [f"-rate={RATE_RPS}", f"-duration={SECONDS}s", f"-timeout={PATIENCE_SECONDS:g}s", "-format=json"]
        command = [program("vegeta"), "attack", *attack, *options, *security, f"-output={results}"]
        output_of(command, json.dumps(request).encode() + b"\n")
        lines = output_of([program("vegeta"), "encode", "-to=json", results]).splitlines()
    for line in lines:
        result = json.loads(line)
        if result["code"] != _OK:
            raise WrongAnswerError(f"one of {len(lines)} came back with {result['code']}: {result['error']}")
        check_rest(base64.b64decode(result["body"]))
    if len(lines) != RATE_RPS * SECONDS:
        raise WrongAnswerError(f"{len(lines)} answers of {RATE_RPS * SECONDS}")
    return f"{len(lines)} of {len(lines)} answered right"


_OK = 200

HTTP_TOOLS: dict[str, Callable[[Target], str]] = {
    "curl_http1": curl_1,
    "curl_http2": curl_2,
    "curl_binary": curl_binary,
    "curl_chunked": curl_chunked,
    "vegeta_http1": vegeta_1,
    "vegeta_http2": vegeta_2,
}
