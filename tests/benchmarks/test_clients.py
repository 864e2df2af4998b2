"""Verdicts on third-party clients: checked numbers, explained h2spec cases, skipped and failed clients."""

import json
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from benchmarks.clients import h2spec, tools
from benchmarks.clients.__main__ import CLIENTS, Verdict, judge, try_out
from benchmarks.clients.protoset import protoset
from benchmarks.clients.target import ANSWER, QUESTION, Target, WrongAnswerError, check, check_grpc, check_rest
from trimtab_protocol.grpc_messages import METHODS, SERVICE, request_class

TARGET = Target("127.0.0.1:1", "127.0.0.1:2", "sample")
REPORT = b"""<?xml version="1.0" encoding="UTF-8"?>
<testsuites>
  <testsuite name="3.8. GOAWAY" package="generic/3.8" tests="2" errors="1">
    <testcase package="generic/3.8" classname="Sends a GOAWAY frame" time="3">
      <error>Connection closed
PING Frame (opaque_data:h2spec\x00\x00\xff)</error>
    </testcase>
    <testcase package="generic/3.8" classname="Sends another" time="0.1"></testcase>
  </testsuite>
</testsuites>"""
GOAWAY = h2spec.Case("generic/3.8", "Sends a GOAWAY frame")


def test_response_is_checked_by_its_numbers():
    check(list(ANSWER))
    check_rest(json.dumps({"outputs": [{"name": "y", "data": list(ANSWER)}]}))
    with pytest.raises(WrongAnswerError, match="right is"):
        check(QUESTION)
    with pytest.raises(WrongAnswerError, match="no answer in"):
        check_rest(b"<html>")


@pytest.mark.parametrize("name", ["rawOutputContents", "raw_output_contents"])
def test_grpc_answers_in_json_are_judged_by_either_name(name):
    check_grpc(json.dumps({name: ["AABAQAAAgEAAAKBAAADQQA=="]}))
    with pytest.raises(WrongAnswerError):
        check_grpc(json.dumps({name: ["AABAQAAAgEAAAKBAAACgQA=="]}))
    with pytest.raises(WrongAnswerError, match="no raw contents"):
        check_grpc("{}")


def test_report_with_raw_frame_bytes_is_read():
    report = h2spec.read_report(REPORT)

    assert report.cases == 2
    assert list(report.failed) == [GOAWAY]
    assert "h2spec" in report.failed[GOAWAY]


def test_report_without_cases_is_rejected():
    with pytest.raises(WrongAnswerError, match="no case"):
        h2spec.read_report(b"<testsuites></testsuites>")


def test_only_exactly_named_cases_are_explained():
    page = "| section | case | why |\n| --- | --- | --- |\n| `generic/3.8` | Sends a GOAWAY frame | so |\n"

    assert h2spec.explained(page) == {GOAWAY}
    assert GOAWAY not in h2spec.explained(page.replace("3.8", "3.9"))


def test_every_row_of_the_page_is_read():
    page = h2spec.EXPLAINED.read_text()

    assert len(h2spec.explained(page)) == sum(line.startswith("| `") for line in page.splitlines())


def test_descriptors_hold_the_protocol_and_invented_methods():
    files = descriptor_pb2.FileDescriptorSet.FromString(protoset(["ServerFlies"])).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    service = pool.FindServiceByName(SERVICE)

    assert [method.name for method in service.methods] == [*METHODS, "ServerFlies"]
    assert (
        service.methods_by_name["ModelInfer"].input_type.full_name == request_class("ModelInfer").DESCRIPTOR.full_name
    )


def test_absent_client_is_skipped_and_failure_stops_no_other():
    def absent(_: Target) -> str:
        raise tools.AbsentError("no node here")

    def broken(_: Target) -> str:
        raise RuntimeError("lost")

    assert try_out("a", absent, TARGET) == Verdict("a", "skipped", "no node here")
    assert try_out("b", broken, TARGET) == Verdict("b", "failed", "RuntimeError: lost")
    assert try_out("c", lambda _: "fine", TARGET) == Verdict("c", "ok", "fine")


def test_outcome_holds_with_a_success_and_without_failures():
    ok, failed, skipped = Verdict("a", "ok", ""), Verdict("b", "failed", "why"), Verdict("c", "skipped", "absent")

    assert judge([ok, skipped], all_required=False).holds
    assert not judge([ok, skipped], all_required=True).holds
    assert not judge([ok, failed], all_required=False).holds
    assert not judge([skipped], all_required=False).holds
    assert judge([ok, failed], all_required=False).figures["b"] == "failed: why"


def test_failed_program_is_quoted():
    with pytest.raises(tools.ProgramError, match="exit code 3: it said so"):
        tools.output_of(["sh", "-c", "echo it said so >&2; exit 3"])
    assert tools.output_of(["sh", "-c", "exit 3"], codes=[3]) == ""


def test_target_uses_tls_only_with_a_ca():
    secured = Target("a:1", "a:2", "m", Path("ca.pem"), "secret")

    assert (TARGET.base_url, secured.base_url) == ("http://127.0.0.1:1", "https://a:1")
    assert (TARGET.headers, secured.headers) == ({}, {"authorization": "Bearer secret"})
    assert try_out("a", lambda _: "fine", secured) == Verdict("a_tls_key", "ok", "fine")
    assert "h2spec" in CLIENTS
