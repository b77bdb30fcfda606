"""What the gateway counts, as Prometheus text. In-flight and readiness are read from the router, never kept twice."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inferloop.fleet.decide.router import Router

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _RouterCollector(Collector):
    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            "inferloop_gateway_in_flight", "Requests a replica is working on for this gateway", labels=["replica"]
        )
        ready = GaugeMetricFamily(
            "inferloop_gateway_replica_ready", "1 when the replica may be given requests", labels=["replica"]
        )
        for load in self._router.snapshot():
            in_flight.add_metric([load.replica_id], load.in_flight)
            ready.add_metric([load.replica_id], float(load.ready))
        yield in_flight
        yield ready


class GatewayMetrics:
    """Counters of one gateway in their own registry, so that two gateways of one process do not mix."""

    def __init__(self, router: Router) -> None:
        self.num_pieces = 0
        """Pieces of answers passed on, which is how a gateway makes steps."""
        self._registry = registry = CollectorRegistry()
        registry.register(_RouterCollector(router))
        name = "inferloop_gateway_"
        self.requests = Counter(name + "requests", "Requests by final status", ["code"], registry=registry)
        self.refusals = Counter(name + "refusals", "Requests no replica was asked", ["reason"], registry=registry)
        self.retries = Counter(name + "retries", "Second attempts at another replica", registry=registry)
        self.faults = Counter(
            name + "replica_faults",
            "Attempts that failed by the replica's fault",
            ["replica", "kind"],
            registry=registry,
        )
        self.broken_streams = Counter(
            name + "broken_streams", "Streams that ended with an error event", registry=registry
        )
        self.disconnects = Counter(name + "disconnects", "Requests whose caller went away", registry=registry)
        self.hops = Counter(name + "hops", "Models asked, where there are several", ["model"], registry=registry)
        self.escalations = Counter(
            name + "escalations", "Answers that failed a check", ["model", "check", "next"], registry=registry
        )
        self.cost = Counter(
            name + "cost_usd", "What answers cost at the contract's prices", ["model"], registry=registry
        )
        self.first_byte = Histogram(
            name + "first_byte_seconds", "Arrival to the first body byte", buckets=_SECONDS, registry=registry
        )

    def render(self) -> bytes:
        return bytes(generate_latest(self._registry))
