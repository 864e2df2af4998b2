"""Target of the clients: the address of the echo pipeline, the request that each client sends, and its response."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2

from trimtab_protocol.grpc_messages import FILE

ROW = (1.0, 2.0, 3.0, 4.5)
"""One row of FP32."""
EXPECTED = tuple(value + 2 for value in ROW)
PATIENCE_SECONDS = 60.0
TIMEOUT_MICROSECONDS = int(PATIENCE_SECONDS * 1e6)
UNKNOWN_METHOD = "ServerFlies"


@dataclass(frozen=True, slots=True)
class Target:
    """A pipeline as clients see it."""

    rest: str
    """HOST:PORT."""
    grpc: str
    """HOST:PORT."""
    model: str
    """Name of the pipeline."""
    ca: Path | None = None
    """Certificate authority to trust; None: plain text."""
    key: str | None = None
    """API key, sent as `authorization: Bearer KEY`."""

    @property
    def base_url(self) -> str:
        return f"{'https' if self.ca else 'http'}://{self.rest}"

    @property
    def infer_url(self) -> str:
        return f"{self.base_url}/v2/models/{self.model}/infer"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


def rest_request() -> str:
    """The REST body, with its numbers in JSON."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, len(ROW)], "data": list(ROW)}
    return json.dumps({"inputs": [tensor], "parameters": {"timeout": TIMEOUT_MICROSECONDS}})


def grpc_request(model: str) -> dict[str, Any]:
    contents = {"fp32_contents": list(ROW)}
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, len(ROW)], "contents": contents}
    timeout = {"int64_param": TIMEOUT_MICROSECONDS}
    return {"model_name": model, "inputs": [tensor], "parameters": {"timeout": timeout}}


def write_protoset(folder: Path) -> str:
    """Write descriptors for clients without reflection, with one method that no server has; return the file's path."""
    file = descriptor_pb2.FileDescriptorProto.FromString(FILE)
    method = file.service[0].method[0]
    file.service[0].method.add(name=UNKNOWN_METHOD, input_type=method.input_type, output_type=method.output_type)
    path = folder / "open_inference.protoset"
    path.write_bytes(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    return str(path)


def check(values: Sequence[float] | Any) -> None:
    assert tuple(np.asarray(values, np.float32).ravel().tolist()) == EXPECTED


def check_rest(body: str | bytes) -> None:
    check(json.loads(body)["outputs"][0]["data"])


def check_grpc(text: str) -> None:
    """Check a ModelInferResponse in protobuf's JSON; its field names depend on the client's descriptors."""
    response = json.loads(text)
    raw = response.get("rawOutputContents") or response["raw_output_contents"]
    check(np.frombuffer(base64.b64decode(raw[0]), "<f4"))
