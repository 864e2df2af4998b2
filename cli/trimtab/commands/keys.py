"""`trimtab keys`: API keys of a pipeline's clients."""

import json
import shlex
import sys
from typing import Annotated

import typer

from trimtab_pipelines.documents import DocumentError
from trimtab_router.envoy.api_keys import ALL, HashedKey, format_entry, key_digest, new_key, read_entries

SECRET = "trimtab-keys"  # noqa: S105 - a name


def new(
    client: Annotated[str, typer.Argument(help="Client's name: letters, digits, dots, dashes and underscores")],
    pipeline: Annotated[
        list[str] | None, typer.Option(help="Pipeline that the client may call; repeatable; default: all")
    ] = None,
    secret: Annotated[str, typer.Option(help="Secret that the chart names")] = SECRET,
) -> int:
    """Create a key and print it once; Envoy stores only its hash."""
    key = new_key()
    entry = format_entry(HashedKey(client, key_digest(key), frozenset(pipeline or (ALL,))))
    problems = read_entries([(client, entry)]).problems
    if problems:
        named = ", ".join(pipeline or (ALL,))
        raise DocumentError(
            f"{problems[0]}" if not pipeline else f"client {client!r}, pipelines {named}: {problems[0]}"
        )
    patch = json.dumps({"stringData": {client: entry}})
    sys.stdout.write(
        f"{key}\n\n"
        "The key is printed only once. Clients send it in the header X-API-Key.\n"
        f"Line for the file that keysFile names:\n\n    {client}: {entry}\n\n"
        "In a cluster, in the pipeline's namespace, create the Secret or add to it:\n\n"
        f"    kubectl create secret generic {secret} --from-literal={shlex.quote(f'{client}={entry}')}\n"
        f"    kubectl patch secret {secret} --type merge --patch {shlex.quote(patch)}\n\n"
        f"To revoke it, remove the line, or: kubectl patch secret {secret} --type json --patch "
        + shlex.quote(json.dumps([{"op": "remove", "path": f"/data/{client}"}]))
        + "\n"
    )
    return 0
