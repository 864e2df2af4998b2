"""`python -m trimtab_router`: the router of one pipeline as a process."""

import argparse
import logging
import sys
from pathlib import Path

import uvloop

from trimtab_pipelines.documents import DocumentError
from trimtab_router.router import MEBIBYTE, Limits
from trimtab_router.server import Options, serve


def parse_options(arguments: list[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="trimtab_router", description=__doc__)
    parser.add_argument("--pipeline", type=Path, required=True, help="pipeline.yaml or its folder")
    parser.add_argument("--plan", type=Path, required=True, help="plan.json, followed as it changes")
    parser.add_argument("--endpoints", type=Path, required=True, help="endpoints.json, followed as it changes")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--rest-port", type=int, default=0, help="0 lets the system choose")
    parser.add_argument("--grpc-port", type=int, default=0, help="0 lets the system choose")
    parser.add_argument("--max-payload-mib", type=int, default=64, help="largest request taken")
    parser.add_argument("--max-in-flight-mib", type=int, default=256, help="payload of all requests under way")
    parser.add_argument("--grace-seconds", type=float, default=10.0, help="how long to hold rows without a replica")
    given = parser.parse_args(arguments)
    limits = Limits(
        max_bytes_in_flight=given.max_in_flight_mib * MEBIBYTE,
        max_payload_bytes=given.max_payload_mib * MEBIBYTE,
        grace_seconds=given.grace_seconds,
    )
    return Options(
        pipeline=given.pipeline,
        plan=given.plan,
        endpoints=given.endpoints,
        host=given.host,
        rest_port=given.rest_port,
        grpc_port=given.grpc_port,
        limits=limits,
    )


def main() -> int:
    """Run the router; exit code 2 for a pipeline that cannot be used, 1 for a port that is taken."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        uvloop.run(serve(parse_options()))
    except DocumentError as error:
        sys.stderr.write(f"trimtab_router: {error}\n")
        return 2
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"trimtab_router: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
