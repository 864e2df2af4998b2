"""`python -m trimtab_router`: the router of one pipeline as a process."""

import argparse
import gc
import logging
import sys
from pathlib import Path

from trimtab_pipelines.documents import DocumentError, load_edge
from trimtab_pipelines.processes.malloc_tuning import keep_freed_memory
from trimtab_protocol import event_loop
from trimtab_router.envoy.sockets import Sockets
from trimtab_router.ingress.admin import AUDIT_LOG
from trimtab_router.limits import Limits
from trimtab_router.server import RouterOptions, serve

COLLECTED_AFTER = (10_000, 20, 10)
"""Containers made and not given back until the garbage collector looks, and how often the older ones are looked at.
A request makes dozens, and hundreds are under way: with Python's own 700 that took a sixth of the router's time."""

LARGEST_KEPT_BYTES, MOST_KEPT_BYTES = 2**20, 2**23
"""Of the memory that a request frees: given back and got anew for each request it took a third of the router's time
over images of 588 KiB."""


def parse_options(arguments: list[str] | None = None) -> RouterOptions:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="trimtab_router", description=__doc__)
    parser.add_argument("--pipeline", type=Path, required=True, help="pipeline.yaml or its folder")
    parser.add_argument("--plan", type=Path, required=True, help="plan.json to start with; followed without --cluster")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--endpoints", type=Path, help="endpoints.json, followed as it changes")
    where.add_argument("--cluster", action="store_true", help="follow plan and replicas by the Kubernetes API")
    parser.add_argument("--namespace", help="the pipeline's namespace (default: as the pipeline says)")
    parser.add_argument(
        "--linger-seconds",
        type=float,
        help="how long to take requests after SIGTERM, while callers learn that we go (default: 5 with --cluster)",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--sockets", type=Path, help="folder of the sockets shared with Envoy; without it REST alone")
    parser.add_argument("--edge", type=Path, help="settings of the door")
    parser.add_argument("--rest-port", type=int, default=0, help="without Envoy; 0 lets the system choose")
    parser.add_argument("--admin-port", type=int, default=0, help="of metrics, state, load; 0 lets the system choose")
    parser.add_argument("--tasks", type=Path, help="folder of the tasks registered here, which replicas follow too")
    parser.add_argument("--admin-keys", type=Path, help="file of hashed keys of those who may register tasks")
    parser.add_argument("--grace-seconds", type=float, default=10.0, help="how long to hold rows without a replica")
    given = parser.parse_args(arguments)
    return RouterOptions(
        pipeline=given.pipeline,
        plan=given.plan,
        endpoints=given.endpoints,
        namespace=given.namespace,
        linger_seconds=(5.0 if given.cluster else 0.0) if given.linger_seconds is None else given.linger_seconds,
        host=given.host,
        rest_port=given.rest_port,
        admin_port=given.admin_port,
        tasks=given.tasks,
        admin_keys=given.admin_keys,
        sockets=None if given.sockets is None else Sockets(given.sockets),
        edge=load_edge(given.edge),
        limits=Limits(grace_seconds=given.grace_seconds),
    )


def main() -> int:
    """Run the router; exit code 2 for a pipeline that cannot be used, 1 for a port that is taken or no cluster."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    audit = logging.getLogger(AUDIT_LOG)
    audit.addHandler(logging.StreamHandler(sys.stderr))  # its lines are JSON from their first character on
    audit.propagate = False
    gc.freeze()  # what was imported stays
    gc.set_threshold(*COLLECTED_AFTER)
    keep_freed_memory(LARGEST_KEPT_BYTES, MOST_KEPT_BYTES)
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
