"""`trimtab keys`: API keys of those who may call a pipeline."""

import json
import shlex
import sys
from typing import Annotated

import typer

from trimtab_pipelines.documents import DocumentError
from trimtab_router.envoy.api_keys import ALL, HashedKey, digest_of, entry_of, new_key, read_entries

SECRET = "trimtab-keys"  # noqa: S105 - a name


def new(
    client: Annotated[str, typer.Argument(help="Whose key it is: letters, digits, dots, dashes and underscores")],
    pipeline: Annotated[list[str] | None, typer.Option(help="A pipeline it may call; repeat; default: all")] = None,
    secret: Annotated[str, typer.Option(help="The Secret that the door's settings or the chart name")] = SECRET,
) -> int:
    """Make a key: it is shown this once; what the door keeps is its hash."""
    key = new_key()
    entry = entry_of(HashedKey(client, digest_of(key), frozenset(pipeline or (ALL,))))
    problems = read_entries([(client, entry)]).problems
    if problems:
        named = ", ".join(pipeline or (ALL,))
        raise DocumentError(
            f"{problems[0]}" if not pipeline else f"client {client!r}, pipelines {named}: {problems[0]}"
        )
    patch = json.dumps({"stringData": {client: entry}})
    sys.stdout.write(
        f"{key}\n\n"
        "This is the key; it is shown only now. Callers send it as the header X-API-Key.\n"
        f"For the file that keysFile names, a line:\n\n    {client}: {entry}\n\n"
        "For a cluster, in the pipeline's namespace (create the Secret, or add to it):\n\n"
        f"    kubectl create secret generic {secret} --from-literal={shlex.quote(f'{client}={entry}')}\n"
        f"    kubectl patch secret {secret} --type merge --patch {shlex.quote(patch)}\n\n"
        f"To revoke it, remove the line, or: kubectl patch secret {secret} --type json --patch "
        + shlex.quote(json.dumps([{"op": "remove", "path": f"/data/{client}"}]))
        + "\n"
    )
    return 0
