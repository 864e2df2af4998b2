"""What is worth a line on stderr: our own faults, never a caller's mistake and never what is reported elsewhere."""

import logging

from trimtab_model_servers.errors import ModelError

_OWN_FAULT = 500


class NotReportedElsewhere(logging.Filter):
    """Drops records of exceptions that reach the user by another way.

    MLServer logs each refused request with its stack trace, though the caller is told; and a model that cannot be
    loaded, though the process ends with that reason.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be written."""
        error = record.exc_info[1] if record.exc_info else None
        callers_fault = getattr(error, "status_code", _OWN_FAULT) < _OWN_FAULT
        return not (callers_fault or isinstance(error, ModelError))


LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"ours": {"()": f"{__name__}.{NotReportedElsewhere.__name__}"}},
    "formatters": {"line": {"format": "%(asctime)s %(name)s %(levelname)s %(message)s"}},
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "filters": ["ours"],
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
            ("trimtab_protocol.mutual_tls", "INFO"),  # who was refused, and why
        )
    },
}
