"""Unsupported requests: each is rejected by name over both protocols; fractions reach every client."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from benchmarks.first_week.checking import Check, Seen, require
from benchmarks.first_week.stranger import NUMBERS, Up, up
from trimtab_protocol import grpc_messages

_UNSUPPORTED = (("shared_memory_region", "region"), ("classification", 3))


def _over_grpc(served: Up, parameter: tuple[str, str | int] | None = None) -> Any:
    message = grpc_messages.request_class("ModelInfer")(model_name="echo")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[1, NUMBERS])
    tensor.contents.fp32_contents.extend([1.0] * NUMBERS)
    if parameter is not None:
        name, value = parameter
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(message.outputs.add(name="y").parameters[name], kind, value)
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        call = channel.unary_unary(
            grpc_messages.method_path("ModelInfer"),
            lambda asked: asked.SerializeToString(),
            grpc_messages.response_class("ModelInfer").FromString,
        )
        return call(message, timeout=10)


def _refused_over_grpc(served: Up, parameter: tuple[str, str | int]) -> str:
    try:
        _over_grpc(served, parameter)
    except grpc.RpcError as error:
        require(error.code() is grpc.StatusCode.INVALID_ARGUMENT, f"gRPC status {error.code()}")
        return str(error.details())
    return "OK"


def refuses_what_it_does_not_do(folder: Path) -> Seen:
    """Outputs in shared memory and classes instead of values are refused."""
    with up(folder) as served:
        for name, value in _UNSUPPORTED:
            status, answer = served.ask(outputs=[{"name": "y", "parameters": {name: value}}])
            told = _refused_over_grpc(served, (name, value))
            require(status == 400 and "not supported" in answer["error"], f"REST, {name}: {status} {answer}")
            require("not supported" in told, f"gRPC, {name}: {told}")
    return Seen("shared memory and class_count are refused over REST and gRPC")


def fractions_are_text(folder: Path) -> Seen:
    """No parameter of an answer over gRPC has a kind that only some clients know."""
    with up(folder) as served:
        kinds = {entry.WhichOneof("parameter_choice") for entry in _over_grpc(served).parameters.values()}
    require(kinds <= {"bool_param", "int64_param", "string_param"}, f"parameters of kinds {sorted(kinds)}")
    return Seen(f"parameters of kinds {', '.join(sorted(kinds))}")


_ALL: tuple[tuple[str, Callable[[Path], Seen]], ...] = (
    ("what is not supported is refused by name", refuses_what_it_does_not_do),
    ("fractions over gRPC are in the common subset", fractions_are_text),
)
CHECKS = tuple(Check("protocol", name, run) for name, run in _ALL)
