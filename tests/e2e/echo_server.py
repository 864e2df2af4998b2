"""Server of the Open Inference Protocol V2 that returns its input x as y, and finishes its requests on SIGTERM."""

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LENGTH = "Inference-Header-Content-Length"


class Handler(BaseHTTPRequestHandler):
    """Requests of one connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._respond(b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        length = int(self.headers.get(LENGTH, len(body)))
        request, raw = json.loads(body[:length]), body[length:]
        given = request["inputs"][0]
        output = {"name": "y", "datatype": "FP32", "shape": given["shape"]}
        output |= {"parameters": {"binary_data_size": len(raw)}} if raw else {"data": given["data"]}
        response = {"model_name": "echo", "outputs": [output]} | {key: request[key] for key in request if key == "id"}
        header = json.dumps(response).encode()
        self._respond(header + raw, {LENGTH: str(len(header))} if raw else {})

    def _respond(self, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def main() -> None:
    server = ThreadingHTTPServer(("", 8080), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever()


if __name__ == "__main__":
    main()
