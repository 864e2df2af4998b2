"""Audit log of the admin port."""

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from trimtab_router.ingress.admin import AUDIT_LOG
from trimtab_router.ingress.audit_log import MAX_CALLS, READ_SECONDS, REFUSED_SECONDS, AdminAuditLog, AdminCall

STATE = AdminCall("GET", "/trimtab/v1/state", "10.0.0.7", 200)
POST = AdminCall("POST", "/trimtab/v1/state", "10.0.0.9", 405)


def logged_lines(audit: AdminAuditLog, calls: Sequence[tuple[AdminCall, float]]) -> list[dict[str, Any]]:
    lines = [audit.line(call, now) for call, now in calls]
    return [json.loads(line) for line in lines if line is not None]


@pytest.mark.parametrize("path", ["/metrics", "/v2/health/live", "/v2/health/ready", "/readyz"])
def test_probes_and_scrapes_are_logged_only_if_refused(path: str):
    assert logged_lines(AdminAuditLog(), [(AdminCall("GET", path, "a", status), 0.0) for status in (200, 503)]) == []
    (refused,) = logged_lines(AdminAuditLog(), [(AdminCall("POST", path, "a", 405), 0.0)])
    assert refused["status"] == 405


def test_repeated_reads_are_logged_once_an_hour():
    other = AdminCall("GET", "/trimtab/v1/state", "10.0.0.8", 200)
    calls = [*((STATE, float(n)) for n in range(10)), (other, 10.0), (STATE, READ_SECONDS + 1)]
    lines = logged_lines(AdminAuditLog(), calls)

    call = {"audit": "admin", "method": "GET", "path": "/trimtab/v1/state", "status": 200, "from": "10.0.0.7"}
    assert lines == [
        {"time": "1970-01-01T00:00:00.000+00:00"} | call,
        lines[0] | {"time": "1970-01-01T00:00:10.000+00:00", "from": "10.0.0.8"},
        lines[0] | {"time": "1970-01-01T01:00:01.000+00:00", "more_since_last_line": 9},
    ]


def test_repeated_refusals_are_counted():
    calls = [(POST, 0.0), (POST, 1.0), (POST, REFUSED_SECONDS), (POST, 2 * REFUSED_SECONDS)]
    lines = logged_lines(AdminAuditLog(), calls)

    assert [line.get("more_since_last_line") for line in lines] == [None, 1, None]


def test_log_lines_are_safe_and_memory_is_bounded():
    audit = AdminAuditLog()
    calls = [(AdminCall("GET", f"/{n}\r\n{'x' * 5000}", "a", 404), 0.0) for n in range(MAX_CALLS + 5)]
    lines = [audit.line(call, now) or "" for call, now in calls]

    assert all(len(line) < 500 and line.isprintable() for line in lines)
    assert audit.line(calls[0][0], 1.0) is not None  # evicted
    assert audit.line(calls[-1][0], 1.0) is None


async def test_admin_calls_are_logged_with_their_client(rig, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger=AUDIT_LOG):
        for path in ("/metrics", "/readyz", "/trimtab/v1/state", "/trimtab/v1/state"):
            assert (await rig.get(path))[0] == 200
        async with rig.session.post(f"{rig.admin_url}/trimtab/v1/arrivals?token=secret") as answer:
            assert answer.status == 405
        async with rig.session.get(f"{rig.admin_url}/config_dump") as answer:
            assert answer.status == 404

    lines = [json.loads(record.message) for record in caplog.records if record.name == AUDIT_LOG]
    assert [(line["method"], line["path"], line["status"], line["from"]) for line in lines] == [
        ("GET", "/trimtab/v1/state", 200, "127.0.0.1"),
        ("POST", "/trimtab/v1/arrivals", 405, "127.0.0.1"),
        ("GET", "/config_dump", 404, "127.0.0.1"),
    ]
