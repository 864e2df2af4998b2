"""Logging configuration: server errors go to stderr, client errors and load failures do not."""

import logging

from trimtab_model_servers.errors import ModelError

_SERVER_ERROR = 500


class NotReportedElsewhere(logging.Filter):
    """Drops records of exceptions that are reported elsewhere.

    MLServer logs the stack trace of each rejected request, which the client receives, and of a model that cannot be
    loaded, which ends the process with the same message.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        is_client_error = getattr(error, "status_code", _SERVER_ERROR) < _SERVER_ERROR
        return not (is_client_error or isinstance(error, ModelError))


LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"server-errors": {"()": f"{__name__}.{NotReportedElsewhere.__name__}"}},
    "formatters": {"line": {"format": "%(asctime)s %(name)s %(levelname)s %(message)s"}},
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "filters": ["server-errors"],
            "formatter": "line",
            "stream": "ext://sys.stderr",
        }
    },
    "root": {"level": "ERROR", "handlers": ["stderr"]},
    "loggers": {
        name: {"level": level, "handlers": [], "propagate": True}
        for name, level in (
            ("mlserver", "ERROR"),
            ("mlserver.grpc", "ERROR"),
            ("uvicorn", "ERROR"),
            ("trimtab_protocol.mutual_tls", "INFO"),  # rejected clients
        )
    },
}
