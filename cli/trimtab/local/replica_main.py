"""What a replica's process does first: it is forked from a server that has imported torch and MLServer already."""

import os
import sys
import threading
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path

from trimtab_pipelines.edge_settings import ReplicaIdentity
from trimtab_pipelines.processes.niceness import lower_priority
from trimtab_pipelines.processes.parent_death import die_with_parent
from trimtab_protocol.mutual_tls import InvalidIdentity, MutualTls

CANNOT_SERVE = 1


def serve(folder: str, log: str, ready: Connection, identity: ReplicaIdentity | None, niceness: int) -> None:
    """Serve a folder of models until SIGTERM; send the ports once ready. Does not return.

    Args:
        folder: what is served.
        log: where what it says goes.
        ready: takes the ports.
        identity: what it and its router show each other.
        niceness: how much it gives way to others where processors are short, 0 (not at all) to 19.
    """
    os.setsid()  # Ctrl-C in the terminal is the supervisor's to handle
    lower_priority(niceness)
    die_with_parent()
    threading.Thread(target=_die_with_supervisor, name="watch supervisor", daemon=True).start()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    # Imported late: the module is preloaded where replicas are forked, and not needed where they are only started from.
    from trimtab_model_servers.errors import ModelError  # noqa: PLC0415
    from trimtab_model_servers.server import run  # noqa: PLC0415

    code = 0
    try:
        shown = MutualTls(identity) if identity else None
        run(Path(folder), ready.send, identity=shown)
    except (ModelError, InvalidIdentity, OSError) as error:
        sys.stderr.write(f"{error}\n")
        code = CANNOT_SERVE
    except BaseException:  # noqa: BLE001  (the process ends here: whatever it was belongs into its log)
        sys.excepthook(*sys.exc_info())
        code = CANNOT_SERVE
    sys.stderr.flush()
    os._exit(code)  # all is closed and written by now; taking torch apart would take seconds


def _die_with_supervisor() -> None:
    """End with the process that asked for this one; the fork server, our parent to the kernel, waits for us to."""
    supervisor = parent_process()
    if supervisor is not None:
        supervisor.join()
        os._exit(CANNOT_SERVE)
