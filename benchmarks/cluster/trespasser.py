"""Requests of a pod in another namespace to ports it may not reach. Runs in that pod; prints the results as JSON."""

import http.client
import json
import socket
import ssl
import sys

import grpc

PATIENCE_SECONDS = 5.0
INFER = "/inference.GRPCInferenceService/ModelInfer"


def reaches(host: str, port: int) -> bool:
    """Whether somebody takes a connection there."""
    try:
        socket.create_connection((host, port), PATIENCE_SECONDS).close()
    except OSError:
        return False
    return True


def rest(host: str, port: int, path: str, headers: dict[str, str], *, tls: bool = True) -> str:
    """Ask for a path; return the status, or what kept the answer away."""
    if tls:
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=PATIENCE_SECONDS, context=trusting)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_SECONDS)  # type: ignore[assignment]
    try:
        connection.request("GET", path, headers=headers)
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def call(host: str, port: int, authority: str, method: str) -> str:
    """Call a method without a message; return the status."""
    with grpc.secure_channel(f"{host}:{port}", grpc.ssl_channel_credentials(authority.encode())) as channel:
        try:
            channel.unary_unary(method, None, None)(b"", timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def main() -> None:
    """Try everything that the argument names."""
    given = json.loads(sys.argv[1])
    host, path, authority = given["host"], given["path"], given["authority"]
    answers = {
        "REST without a key": rest(host, given["rest"], path, {}),
        "REST with a key that nobody has": rest(host, given["rest"], path, {"x-api-key": "tt_nobody"}),
        "REST with a token that nobody signed": rest(host, given["rest"], path, {"authorization": "Bearer a.b.c"}),
        "REST that says who it is": rest(host, given["rest"], path, {"x-trimtab-client": "key:load"}),
        "REST in plain text": rest(host, given["rest"], path, {}, tls=False),
        "gRPC without a key": call(host, given["grpc"], authority, INFER),
    }
    reached = {name: reaches(*where) for name, where in given["ports"].items()}
    print(json.dumps({"answers": answers, "reached": reached}))


if __name__ == "__main__":
    main()
