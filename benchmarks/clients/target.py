"""Target of the clients: the pipeline's address, the request that each sends, and the check of its response."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

QUESTION = (1.0, 2.0, 3.0, 4.5)
"""One row of FP32. Two stages add one each."""
ANSWER = tuple(value + 2 for value in QUESTION)
PATIENCE_SECONDS = 60.0
PATIENCE_MICROSECONDS = int(PATIENCE_SECONDS * 1e6)


class WrongAnswerError(Exception):
    """A client was answered, but not with what is right."""


@dataclass(frozen=True, slots=True)
class Target:
    """A pipeline as callers see it.

    Attributes:
        rest, grpc: HOST:PORT of each protocol.
        model: the pipeline's name.
        ca: the certificate authority to trust; None speaks plain text.
        key: sent as `authorization: Bearer KEY`.
    """

    rest: str
    grpc: str
    model: str
    ca: Path | None = None
    key: str | None = None

    @property
    def base_url(self) -> str:
        """The address of the REST side."""
        return f"{'https' if self.ca else 'http'}://{self.rest}"

    @property
    def infer_url(self) -> str:
        """Where REST requests go."""
        return f"{self.base_url}/v2/models/{self.model}/infer"

    @property
    def manner(self) -> str:
        """What a client's name is followed by where it calls in a safe manner."""
        return "_tls" * bool(self.ca) + "_key" * bool(self.key)

    @property
    def headers(self) -> Mapping[str, str]:
        """What proves who is calling."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


def rest_question() -> str:
    """The question as a REST body, the numbers spelled out."""
    entry = {"name": "x", "datatype": "FP32", "shape": [1, len(QUESTION)], "data": list(QUESTION)}
    return json.dumps({"inputs": [entry], "parameters": {"timeout": PATIENCE_MICROSECONDS}})


def grpc_question(model: str) -> str:
    """The question as a ModelInferRequest in protobuf's JSON."""
    entry = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, len(QUESTION)],
        "contents": {"fp32_contents": list(QUESTION)},
    }
    timeout = {"int64_param": PATIENCE_MICROSECONDS}
    return json.dumps({"model_name": model, "inputs": [entry], "parameters": {"timeout": timeout}})


def check(values: Sequence[float] | Any) -> None:
    """Raise WrongAnswerError where these are not the right numbers."""
    given = tuple(np.asarray(values, np.float32).ravel().tolist())
    if given != ANSWER:
        raise WrongAnswerError(f"answered {given}; right is {ANSWER}")


def check_rest(body: str | bytes) -> None:
    """Judge a REST answer whose numbers are spelled out."""
    try:
        values = json.loads(body)["outputs"][0]["data"]
    except (ValueError, LookupError, TypeError):
        raise WrongAnswerError(f"no answer in {body[:200]!r}") from None
    check(values)


def check_grpc(text: str) -> None:
    """Judge a ModelInferResponse in protobuf's JSON, its numbers as raw contents.

    Fields are named in camel case where the descriptors say so, and else as in the protocol.
    """
    try:
        answer = json.loads(text)
        raw = base64.b64decode((answer.get("rawOutputContents") or answer["raw_output_contents"])[0])
    except (ValueError, LookupError, TypeError, AttributeError):
        raise WrongAnswerError(f"no raw contents in {text[:200]!r}") from None
    check(np.frombuffer(raw, "<f4"))
