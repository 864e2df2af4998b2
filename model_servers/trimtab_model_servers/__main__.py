"""One replica on the command line: prints its ports as one line of JSON once every model is loaded and warmed."""

import argparse
import json
import os
import sys
from pathlib import Path

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.ports import Ports
from trimtab_model_servers.server import run


def main() -> int:
    """Serve until SIGTERM; return the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m trimtab_model_servers", description=__doc__)
    parser.add_argument("folder", type=Path, help="holds settings.json and NAME/model-settings.json")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--data-port", type=int, default=0, help="port of the data port (default: a free one)")
    arguments = parser.parse_args()
    try:
        run(arguments.folder, _announce, address=arguments.host, data_port=arguments.data_port)
    except (ModelError, OSError) as error:
        sys.stderr.write(f"trimtab_model_servers: {error}\n")
        return 1
    return 0


def _announce(ports: Ports) -> None:
    sys.stdout.write(json.dumps(ports.as_dict()) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # all is closed and written by now; taking torch apart would keep whoever waits for seconds
