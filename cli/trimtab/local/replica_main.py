"""Entry point of a replica's process, which is forked from a server that has imported torch and MLServer."""

import os
import sys
import threading
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path

from trimtab_pipelines.edge_settings import ReplicaIdentity
from trimtab_pipelines.processes.child_process import REJECTED
from trimtab_pipelines.processes.parent_death import die_with_parent
from trimtab_protocol.mutual_tls import InvalidIdentity, MutualTls

CANNOT_SERVE = 1


def serve(folder: str, log: str, ready: Connection, identity: ReplicaIdentity | None) -> None:
    """Serve a folder of models until SIGTERM, with output into `log`; send the ports once ready. Does not return."""
    os.setsid()  # Ctrl-C in the terminal is the supervisor's to handle
    die_with_parent()
    threading.Thread(target=_die_with_supervisor, name="watch supervisor", daemon=True).start()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    # Imported here: the fork server preloads these modules, the process that starts replicas does not need them.
    from trimtab_model_servers.errors import ModelError  # noqa: PLC0415
    from trimtab_model_servers.server.replica import Listeners, run  # noqa: PLC0415

    code = 0
    try:
        mutual_tls = MutualTls(identity) if identity else None
        run(Path(folder), ready.send, Listeners(identity=mutual_tls))
    except (ModelError, InvalidIdentity, OSError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        code = REJECTED if isinstance(error, ModelError) else CANNOT_SERVE
    except BaseException:  # noqa: BLE001  (logged, and the process ends)
        sys.excepthook(*sys.exc_info())
        code = CANNOT_SERVE
    sys.stderr.flush()
    os._exit(code)  # everything is closed and written; unloading torch would take seconds


def _die_with_supervisor() -> None:
    """End with the process that started this one; the kernel's parent is the fork server."""
    supervisor = parent_process()
    if supervisor is not None:
        supervisor.join()
        os._exit(CANNOT_SERVE)
