"""Requests of a pod without access to the ports and paths that its argument names; prints the results as JSON."""

import http.client
import json
import socket
import ssl
import sys

import grpc

PATIENCE_SECONDS = 5.0
INFER = "/inference.GRPCInferenceService/ModelInfer"


def reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), PATIENCE_SECONDS).close()
    except OSError:
        return False
    return True


def rest(host: str, port: int, path: str, headers: dict[str, str], *, tls: bool = True) -> str:
    """The status of a GET, or the error in its place."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_SECONDS)
    if tls:
        connection = http.client.HTTPSConnection(host, port, timeout=PATIENCE_SECONDS, context=trusting)
    try:
        connection.request("GET", path, headers=headers)
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def call(host: str, port: int, authority: str, method: str) -> str:
    with grpc.secure_channel(f"{host}:{port}", grpc.ssl_channel_credentials(authority.encode())) as channel:
        try:
            channel.unary_unary(method, None, None)(b"", timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def main() -> None:
    given = json.loads(sys.argv[1])
    host, path, authority = given["host"], given["path"], given["authority"]
    responses = {
        "REST without a key": rest(host, given["rest"], path, {}),
        "REST with an unknown key": rest(host, given["rest"], path, {"x-api-key": "tt_unknown"}),
        "REST with an unsigned token": rest(host, given["rest"], path, {"authorization": "Bearer a.b.c"}),
        "REST with the router's own header": rest(host, given["rest"], path, {"x-trimtab-client": "key:load"}),
        "REST in plain text": rest(host, given["rest"], path, {}, tls=False),
        "gRPC without a key": call(host, given["grpc"], authority, INFER),
    }
    reached = {name: reaches(*address) for name, address in given["ports"].items()}
    sys.stdout.write(json.dumps({"responses": responses, "reached": reached}) + "\n")


if __name__ == "__main__":
    main()
