"""The report as a page that grows while a run goes on, in a real browser."""

import asyncio
import base64
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.cli.runs import a_run, a_sample, plans
from trimtab import run_record
from trimtab.local.supervisor import Fault
from trimtab.remote_recorder import sum_counters
from trimtab.report.live_page import LivePage, PageError
from trimtab.report.summary import summary_items
from trimtab.run_samples import Run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def recorder(folder: Path) -> run_record.Recorder:
    """A run that has just begun."""
    begun = run_record.Recorder(folder, "sample", a_run().pipeline)
    begun.start(None)
    run_record.write_decisions(folder, plans())
    return begun


def extend(begun: run_record.Recorder, seconds: range) -> None:
    for second in seconds:
        begun.add(a_sample(second), [Fault(a_sample(5).at, "replica first-0 ended")] if second > 5 else [], 1.0)


async def test_each_look_tells_what_was_recorded_until_then(tmp_path: Path) -> None:
    begun, page = recorder(tmp_path), LivePage(tmp_path, 0)
    await page.start()
    try:
        async with httpx.AsyncClient(base_url=page.url, trust_env=False) as client:
            assert (await client.get("parts")).status_code == 503
            extend(begun, range(20))
            first = (await client.get("parts")).json()
            page._made_at = 0.0  # as if a second had passed
            extend(begun, range(20, 60))
            second = (await client.get("parts")).json()
            elsewhere = await client.get("parts", headers={"Host": "evil.example"})
    finally:
        await page.stop()
    curves = [told["charts"]["chart-load"]["data"][0]["x"] for told in (first, second)]
    lengths = [len(base64.b64decode(curve["bdata"])) // np.dtype(curve["dtype"]).itemsize for curve in curves]
    assert lengths == [19, 59]
    assert (first["seconds"], second["seconds"], second["finished"]) == (19, 59, False)
    words = "".join(second["parts"])
    for said in ("Plan 3, the latest", "to slow &lt;because&gt;", "replica first-0 ended", "Stage first", "declared"):
        assert said in words
    assert elsewhere.status_code == 403


async def test_who_looks_is_shown_the_finished_run(tmp_path: Path) -> None:
    extend(recorder(tmp_path), range(20))
    page = LivePage(tmp_path, 0)
    await page.start()
    async with httpx.AsyncClient(base_url=page.url, trust_env=False) as client:
        await client.get("parts")
        ending = asyncio.create_task(page.finish(a_run()))
        await asyncio.sleep(0)
        told = (await client.get("parts")).json()
        await ending
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient(trust_env=False).get(page.url)
    assert told["finished"]
    assert "measured" in "".join(told["parts"])


async def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    first = LivePage(tmp_path, 0)
    await first.start()
    try:
        with pytest.raises(PageError, match=f"port {first.port} is taken .*; --page-port gives another"):
            await LivePage(tmp_path, first.port).start()
    finally:
        await first.stop()


def test_a_long_run_is_read_in_part(tmp_path: Path) -> None:
    extend(recorder(tmp_path), range(1000))
    run_record.write_decisions(tmp_path, plans() * 200)
    found: Run = run_record.load(tmp_path, 100, 20)
    assert len(found.plans) <= 20
    at = [round(sample.at - found.samples[0].at) for sample in found.samples]
    assert at[0] == 0
    assert at[-50:] == list(range(950, 1000))
    assert len(at) <= 100


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
async def test_charts_grow_in_a_real_browser(tmp_path: Path) -> None:
    """The browser draws what is there, asks again, and shows what has come since; then it says that the run ended."""
    begun, page = recorder(tmp_path), LivePage(tmp_path, 0)
    extend(begun, range(20))
    await page.start()
    try:
        first = await seen(page.url, tmp_path / "a")
        extend(begun, range(20, 60))
        page.final = None
        second = await seen(page.url, tmp_path / "b")
    finally:
        await page.stop()
    assert 'data-state="live"' in first
    assert ('data-seconds="19"' in first, 'data-seconds="59"' in second) == (True, True)
    for text in ("Stage first", "Plan 3, the latest", "Not answered in time"):
        assert text in second
    assert second.count("main-svg") >= 2 * 6  # plotly has drawn each chart
    assert second.count("js-plotly-plot") >= 6


async def seen(url: str, profile: Path) -> str:
    """What a browser has made of a page after some seconds of its own time."""
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--no-first-run"]
    command = [BROWSER, *options, "--virtual-time-budget=6000", "--dump-dom", url]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    return output.decode()


def test_the_page_says_nothing_that_is_no_json(tmp_path: Path) -> None:
    """Curves have gaps, which JSON has no number for."""
    from trimtab.report.live_page import _seen  # noqa: PLC0415

    extend(recorder(tmp_path), range(3))
    json.loads(json.dumps(_seen(tmp_path, None), allow_nan=False))


def test_what_several_routers_counted_is_added_up() -> None:
    one, other = a_sample(10).counters, a_sample(30).counters
    both = sum_counters([one, other])
    assert (both.received, both.outcomes["ok"], both.accuracy_count) == (400, 400, 400)
    assert both.latency_buckets[2.0] == 400
    assert sum_counters([one]) == one


def test_requests_under_way_are_no_fault_of_the_sums(tmp_path: Path) -> None:
    extend(recorder(tmp_path), range(20))
    run = run_record.load(tmp_path)
    last = run.samples[-1]
    busy = replace(last, counters=replace(last.counters, received=last.counters.received + 3))
    (card, *_) = summary_items(replace(run, samples=[*run.samples, busy]))
    assert "+ 3 under way" in card.detail
    assert card.holds is None
    assert summary_items(run)[0].holds is True
