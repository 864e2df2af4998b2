"""Credentials that a replica in a pod takes from its Secret: those of weight sources, and no others.

The pod's variables have a prefix, because a Secret may have any key: PYTHONPATH, LD_PRELOAD or HTTPS_PROXY as plain
variables would change the server itself.
"""

import os
from collections.abc import MutableMapping

from trimtab_pipelines.kubernetes_names import CREDENTIALS_PREFIX

KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_CA_BUNDLE",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_ENDPOINT",
    "HF_TOKEN",
)


def take_credentials(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables in ``KEYS`` from the Secret, and remove all prefixed variables from the environment."""
    secret = {name: environment.pop(name) for name in list(environment) if name.startswith(CREDENTIALS_PREFIX)}
    environment.update({key: secret[CREDENTIALS_PREFIX + key] for key in KEYS if CREDENTIALS_PREFIX + key in secret})
