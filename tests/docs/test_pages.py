"""Documentation against the code: settings load; metrics, reasons, fields and values are listed; links resolve."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from trimtab_adapter.metrics import AdapterMetrics
from trimtab_model_servers.server.chat_metrics import exposition
from trimtab_operator.metrics import Metrics as OperatorMetrics
from trimtab_pipelines.documents import load_edge, parse
from trimtab_pipelines.edge_settings import AccessLogField, EdgeSettings
from trimtab_pipelines.request_outcome import CLIENT_LIMIT_REASONS, PROXY_REASONS
from trimtab_pipelines.spec import ServiceLevel
from trimtab_router.envoy.access_log import loggers
from trimtab_router.observability.metrics import Metrics

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
SECURITY, OBSERVE = ((ROOT / "docs" / "operate" / name).read_text() for name in ("security.md", "observability.md"))
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")


def block(language: str, page: str) -> str:
    """Return the first code block of a language on a page."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return str(found[0])


def words(page: str) -> set[str]:
    """Return the texts in code marks."""
    return set(re.findall(r"`([^`\n]+)`", page))


def test_documented_settings_load_and_cover_every_field(tmp_path: Path):
    (tmp_path / "edge.yaml").write_text(block("yaml", SECURITY))
    settings = load_edge(tmp_path / "edge.yaml")
    shown = yaml.safe_load(block("yaml", SECURITY))
    fields = EdgeSettings.model_json_schema(by_alias=True)["properties"]

    assert settings.authenticates
    assert set(fields) - set(shown) == {"keysSecret"}  # the cluster's
    assert set(shown["jwt"][0]) == set(settings.model_dump(by_alias=True)["jwt"][0])
    assert set(shown["clients"]) == set(settings.model_dump(by_alias=True)["clients"])


def test_documented_defaults_match_the_code():
    shown = yaml.safe_load(block("yaml", SECURITY))
    unchanged = {name: shown[name] for name in ("timeouts", "maxConnections", "maxStreams", "trustedHops", "memory")}

    assert parse(EdgeSettings, unchanged, "docs/operate/security.md") == EdgeSettings()


def test_every_edge_value_of_the_chart_is_documented():
    values = yaml.safe_load((ROOT / "charts" / "trimtab" / "values.yaml").read_text())["edge"]
    named = {word.removesuffix(".*") for page in (SECURITY, OBSERVE) for word in words(page)}

    assert {f"edge.{name}" for name in values if not _covered(f"edge.{name}", named)} == set()


def _covered(value: str, named: set[str]) -> bool:
    return any(word == value or word.startswith(f"{value}.") for word in named)


def test_every_field_of_the_access_log_is_documented():
    (line,) = [one for one in loggers("All", get_args(AccessLogField)) if "stdout" in one["name"]]
    fields: dict[str, Any] = line["typed_config"]["log_format"]["json_format"]

    assert set(fields) - words(OBSERVE) == set()


def test_every_reason_of_the_proxy_is_documented():
    assert (set(PROXY_REASONS) | CLIENT_LIMIT_REASONS) - words(OBSERVE) == set()


def test_documented_metrics_are_the_exposed_metrics():
    """Metrics of routers, the adapter, the operator and replicas that serve chats."""
    adapter = CollectorRegistry()
    adapter.register(AdapterMetrics())
    pages = [
        b"".join(Metrics("a", "p", ServiceLevel.model_validate({"latency": "400ms"})).exposition()),
        generate_latest(adapter),
        generate_latest(OperatorMetrics().registry),
        exposition({}),
    ]
    named = {word.partition("{")[0] for word in words(OBSERVE) if word.startswith("trimtab_")}
    known = {name for text in pages for name in re.findall(r"^# TYPE (\S+)", text.decode(), re.MULTILINE)}

    assert len(known) > 40
    assert named - known == set()
    assert {name for name in known if not name.endswith("_created")} - named == set()


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_resolve(page: Path):
    broken = []
    for path, heading in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (heading and heading not in headings(target)):
            broken.append(f"{path}#{heading}")

    assert broken == []


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}
