"""What an operator watches. Labels come from closed sets only: no task, key or project ever becomes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)

Readings = Callable[[], Mapping[tuple[str, ...], float]]
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


class _Readings(Collector):
    """Figures that are kept elsewhere and read when somebody asks."""

    def __init__(self, family: Family, name: str, text: str, labels: tuple[str, ...], read: Readings) -> None:
        self._family, self._name, self._text, self._labels, self._read = family, name, text, labels, read

    def collect(self) -> Iterable[Metric]:
        family = self._family(self._name, self._text, labels=self._labels)
        for labels, value in self._read().items():
            family.add_metric(labels, value)
        yield family


class Metrics:
    """One manager's figures, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "sojourn_requests", "Requests answered, by route of the table and class of status.", ["route", "status"],
            registry=self.registry,
        )  # fmt: skip
        self.request_seconds = Histogram(
            "sojourn_request_seconds", "From a request's headers to the end of its answer.", ["route"],
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.commands = Counter(
            "sojourn_commands", "Foreground commands by how they ended.", ["outcome"], registry=self.registry
        )
        self.placements = Counter(
            "sojourn_placements", "Foreground commands by how their sandbox was found: bound, warm or cold.",
            ["provisioned"], registry=self.registry,
        )  # fmt: skip
        self.refusals = Counter(
            "sojourn_refusals", "Requests refused or failed, by code.", ["code"], registry=self.registry
        )
        # A look-up of a child by its labels costs more than counting: each is kept once it was used.
        self._by_route: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._by_outcome: dict[tuple[str, str], tuple[Counter, Counter]] = {}

    def request_ended(self, route: str, status: int, seconds: float) -> None:
        """`route`: a template of the table. Statuses are counted by their hundreds."""
        key = (route, status // 100)
        kept = self._by_route.get(key)
        if kept is None:
            kept = self._by_route[key] = (
                self.requests.labels(route, f"{status // 100}xx"),
                self.request_seconds.labels(route),
            )
        kept[0].inc()
        kept[1].observe(seconds)

    def command_ended(self, outcome: str, provisioned: str) -> None:
        """`outcome`: a reason of the interface, or "disconnected" where the caller hung up first."""
        key = (outcome, provisioned)
        kept = self._by_outcome.get(key)
        if kept is None:
            kept = self._by_outcome[key] = (self.commands.labels(outcome), self.placements.labels(provisioned))
        kept[0].inc()
        kept[1].inc()

    def refused(self, code: str) -> None:
        self.refusals.labels(code).inc()

    def gauge(self, name: str, text: str, labels: tuple[str, ...], read: Readings) -> None:
        """Values that go up and down, by label values, as `read` gives them at each scrape. It must not block."""
        self.registry.register(_Readings(GaugeMetricFamily, name, text, labels, read))

    def counter(self, name: str, text: str, labels: tuple[str, ...], read: Readings) -> None:
        """The same for counts that only grow; `_total` is added to the name."""
        self.registry.register(_Readings(CounterMetricFamily, name, text, labels, read))

    def render(self) -> bytes:
        """The text exposition of all of it."""
        return generate_latest(self.registry)
