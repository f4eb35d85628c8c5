"""What CAM reports about itself: counters that every job feeds, in process and as Prometheus text."""

from cam.observe.groups import REGISTRY, GroupCollector, prometheus_text

__all__ = ["REGISTRY", "GroupCollector", "prometheus_text"]
