"""`python -m trimtab_router`: the router of one pipeline."""

import argparse
import gc
import logging
import sys
from pathlib import Path

from trimtab_pipelines.documents import DocumentError, load_edge
from trimtab_pipelines.processes.malloc_tuning import retain_freed_memory
from trimtab_protocol import event_loop
from trimtab_router.envoy.sockets import Sockets
from trimtab_router.ingress.admin import AUDIT_LOG
from trimtab_router.limits import Limits
from trimtab_router.server import RouterOptions, serve

GC_THRESHOLDS = (10_000, 20, 10)
"""Thresholds of the garbage collector. A request creates dozens of containers, and hundreds are in flight: with
Python's defaults collection took a sixth of the router's time."""

KEPT_BLOCK_BYTES, KEPT_TOTAL_BYTES = 2**20, 2**23
"""Freed memory that malloc keeps: the largest block, and the total. Returning it to the system took a third of the
router's time with images of 588 KiB."""


def parse_options(arguments: list[str] | None = None) -> RouterOptions:
    parser = argparse.ArgumentParser(prog="trimtab_router", description=__doc__)
    parser.add_argument("--pipeline", type=Path, required=True, help="pipeline.yaml or its folder")
    parser.add_argument("--plan", type=Path, required=True, help="initial plan.json; watched unless --cluster is given")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--endpoints", type=Path, help="endpoints.json, watched for changes")
    source.add_argument("--cluster", action="store_true", help="watch plan and replicas through the Kubernetes API")
    parser.add_argument("--namespace", help="namespace of the pipeline (default: that of its document)")
    parser.add_argument(
        "--linger-seconds",
        type=float,
        help="time to accept requests after SIGTERM while not ready (default: 5 with --cluster, else 0)",
    )
    parser.add_argument("--host", default="127.0.0.1")
    proxy = parser.add_mutually_exclusive_group(required=True)
    proxy.add_argument("--sockets", type=Path, help="folder of the sockets shared with Envoy")
    proxy.add_argument("--no-proxy", action="store_true", help="plain REST without Envoy, for trusted clients only")
    parser.add_argument("--edge", type=Path, help="settings of the proxy (edge.yaml)")
    parser.add_argument("--rest-port", type=int, default=0, help="port with --no-proxy; 0 lets the system choose")
    parser.add_argument("--admin-port", type=int, default=0, help="metrics, state, tasks; 0 lets the system choose")
    parser.add_argument("--tasks", type=Path, help="folder of the tasks registered at run time, watched by replicas")
    parser.add_argument("--admin-keys", type=Path, help="file of hashed keys that may register tasks")
    parser.add_argument("--grace-seconds", type=float, default=10.0, help="time to queue rows without a replica")
    options = vars(parser.parse_args(arguments))
    in_cluster, grace_seconds = options.pop("cluster"), options.pop("grace_seconds")
    if options["linger_seconds"] is None:
        options["linger_seconds"] = 5.0 if in_cluster else 0.0
    del options["no_proxy"]
    options["sockets"] = options["sockets"] and Sockets(options["sockets"])
    options["edge"] = load_edge(options["edge"])
    return RouterOptions(**options, limits=Limits(grace_seconds=grace_seconds))


def main() -> int:
    """Run the router. Exit code 2 for an invalid pipeline, 1 for a port in use or a missing cluster."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    audit = logging.getLogger(AUDIT_LOG)
    audit.addHandler(logging.StreamHandler(sys.stderr))  # its lines are JSON without a prefix
    audit.propagate = False
    gc.freeze()  # imported objects are never collected
    gc.set_threshold(*GC_THRESHOLDS)
    retain_freed_memory(KEPT_BLOCK_BYTES, KEPT_TOTAL_BYTES)
    try:
        event_loop.run(serve(parse_options()))
    except DocumentError as error:
        sys.stderr.write(f"trimtab_router: {error}\n")
        return 2
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"trimtab_router: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
