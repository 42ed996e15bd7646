"""A sink that Prometheus scrapes."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..records import StepStats
from .sink import Sink, flatten_step
from .tracker import imported

_ODD = re.compile(r"[^a-zA-Z0-9_]")
_TOTALS = {
    "steps": "Steps of the optimizer, including skipped ones.",
    "skipped": "Steps that left the parameters as they were.",
    "clipped": "Steps whose gradients were scaled down.",
    "nonfinite": "Steps whose gradients held NaN or Inf.",
}


class PrometheusSink(Sink):
    """Exposes the run to Prometheus, which scrapes it, usually once in thousands of steps.

    There are totals over all steps (`fastguard_steps_total`, `_skipped_total`, `_clipped_total`, `_nonfinite_total`,
    and `fastguard_findings_total` by rule and severity), the newest value of each key of a log (`grad/norm` is
    `fastguard_grad_norm`), and the largest finite norm and loss since the last scrape
    (`fastguard_grad_norm_largest`, `fastguard_loss_largest`). Any scrape resets these two, also one by a browser.

    Args:
        port: port of the sink's own server, which asks for no password; 0 picks a free one. The server starts with the
            first record, so ranks that get no records do not occupy the port.
        addr: address to listen on; by default only this machine can connect. "0.0.0.0" accepts any host.

    Attributes:
        port: port of the running server, or None.

    Raises:
        ImportError: prometheus_client is missing.

    Cost: 3 us a step on the training thread; 1 ms a scrape on another thread.
    """

    def __init__(self, port: int = 9464, *, addr: str = "127.0.0.1") -> None:
        self._client = imported("prometheus_client", "PrometheusSink", "prometheus")
        self._families = imported("prometheus_client.core", "PrometheusSink", "prometheus")
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._record: StepStats | None = None
        self._found: Counter[tuple[str, str]] = Counter()
        self._largest: dict[str, float] = {}
        self._server: Any = None
        self.port: int | None = None
        self._address, self._is_closed = (port, addr), False

    def write(self, record: StepStats) -> None:
        """Counts the step, and keeps the record for the next scrape; an OSError if the port is taken."""
        norm = record.norm
        with self._lock:
            totals, largest = self._totals, self._largest
            totals["steps"] += 1
            totals["skipped"] += record.skipped
            totals["clipped"] += record.clipped
            for key, value in (("grad/norm", norm), ("loss", record.loss)):
                if value is not None and math.isfinite(value) and value > largest.get(key, -math.inf):
                    largest[key] = value
            totals["nonfinite"] += not math.isfinite(norm)
            self._record = record
        if self._server is None and not self._is_closed:
            registry = self._client.CollectorRegistry()
            registry.register(self)
            self._server, self._thread = self._client.start_http_server(*self._address, registry=registry)
            self.port = self._server.server_port

    def tell(self, finding: dict[str, Any]) -> None:
        """Counts the finding."""
        with self._lock:
            self._found[finding["rule"], finding["severity"]] += 1

    def collect(self) -> Iterator[Any]:
        """Yields the metrics; prometheus_client calls it at each scrape."""
        with self._lock:
            totals, found, record = dict(self._totals), dict(self._found), self._record
            largest, self._largest = self._largest, {}
        counter, gauge = self._families.CounterMetricFamily, self._families.GaugeMetricFamily
        for name, text in _TOTALS.items():
            yield counter(f"fastguard_{name}", text, value=totals[name])
        findings = counter("fastguard_findings", "Findings of the rules.", labels=["rule", "severity"])
        for labels, count in found.items():
            findings.add_metric(list(labels), count)
        yield findings
        for key, value in ({} if record is None else flatten_step(record)).items():
            if key != "step" and value.__class__ is not list:
                yield gauge(_metric(key), f"{key} of the newest step.", value=float(value))
        for key, value in largest.items():
            yield gauge(f"{_metric(key)}_largest", f"Largest {key} since the last scrape.", value=value)

    def close(self) -> None:
        """Stops the server. A forked process only closes its socket. A second call does nothing."""
        server, self._server, self._is_closed = self._server, None, True
        if server is not None:
            if self._thread.is_alive():
                server.shutdown()
            server.server_close()
            self._thread.join()

    def __repr__(self) -> str:
        return f"PrometheusSink({'' if self.port is None else self.port})"


def _metric(key: str) -> str:
    return f"fastguard_{_ODD.sub('_', key)}"
