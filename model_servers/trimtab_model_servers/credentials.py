"""What a replica in a pod takes from the Secret it was given: credentials and addresses of weights, nothing else.

A Secret's keys are whatever its owner wrote. As plain variables PYTHONPATH, LD_PRELOAD or HTTPS_PROXY among them would
change the server itself, so the pod has them behind a prefix.
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
    """Set the variables we know from the Secret; the rest of it is taken out of the environment."""
    given = {name: environment.pop(name) for name in list(environment) if name.startswith(CREDENTIALS_PREFIX)}
    environment.update({key: given[CREDENTIALS_PREFIX + key] for key in KEYS if CREDENTIALS_PREFIX + key in given})
