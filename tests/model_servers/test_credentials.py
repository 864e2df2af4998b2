"""Credentials: only known variables are taken from a Secret."""

from trimtab_model_servers.weights.source import take_credentials


def test_only_known_credentials_are_taken_from_a_secret():
    environment = {
        "PATH": "/usr/bin",
        "AWS_REGION": "eu-central-1",
        "TRIMTAB_SECRET_AWS_ACCESS_KEY_ID": "reader",
        "TRIMTAB_SECRET_AWS_ENDPOINT_URL": "http://minio:9000",
        "TRIMTAB_SECRET_PYTHONPATH": "/weights",
        "TRIMTAB_SECRET_LD_PRELOAD": "/weights/evil.so",
        "TRIMTAB_SECRET_HTTPS_PROXY": "http://proxy:3128",
        "TRIMTAB_SECRET_PATH": "/weights",
        "TRIMTAB_SECRET_TRIMTAB_WEIGHTS_CACHE": "/",
    }
    take_credentials(environment)

    assert environment == {
        "PATH": "/usr/bin",
        "AWS_REGION": "eu-central-1",
        "AWS_ACCESS_KEY_ID": "reader",
        "AWS_ENDPOINT_URL": "http://minio:9000",
    }
