"""`watch_certificates`: when the certificates of the proxy and of the connections to replicas expire."""

import asyncio
import logging
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_protocol.mutual_tls import expiration_time
from trimtab_router.envoy.overload_controller import EnvoyAdmin, EnvoyUnavailable
from trimtab_router.observability.metrics import Metrics

log = logging.getLogger(__name__)

PERIOD_SECONDS = 30.0
DAY_SECONDS = 86400.0
WARNING_DAYS = 7
PROXY, REPLICAS = "proxy", "replicas"


async def watch_certificates(metrics: Metrics, settings: EdgeSettings, envoy: EnvoyAdmin | None) -> None:
    """Report the certificates in use, without end; log those that expire soon, once a day."""
    logged_at: dict[str, float] = {}
    while True:
        now = time.time()
        for certificate, expires_at in (await _expiration_times(settings, envoy)).items():
            metrics.record_certificate_expiration(certificate, expires_at)
            days = (expires_at - now) / DAY_SECONDS
            if days < WARNING_DAYS and now - logged_at.get(certificate, 0.0) > DAY_SECONDS:
                log.warning("the certificate for %s %s; renew it", certificate, _in_words(days))
                logged_at[certificate] = now
        await asyncio.sleep(PERIOD_SECONDS)


async def _expiration_times(settings: EdgeSettings, envoy: EnvoyAdmin | None) -> Mapping[str, float]:
    """Unix times by certificate, of those that can be read."""
    times: dict[str, float] = {}
    if settings.replicas is not None:
        file = Path(settings.replicas.certificate)
        try:
            times[REPLICAS] = expiration_time(await asyncio.to_thread(file.read_text))
        except (OSError, ValueError) as error:
            log.warning("%s: %s", file, error)
    if settings.tls is not None and envoy is not None:
        try:
            expirations = await envoy.certificate_expirations()
        except EnvoyUnavailable as error:
            log.debug("%s", error)
        else:
            times |= {PROXY: min(map(datetime.timestamp, expirations))} if expirations else {}
    return times


def _in_words(days: float) -> str:
    return f"expires in {days:.1f} days" if days > 0 else f"expired {-days:.1f} days ago"
