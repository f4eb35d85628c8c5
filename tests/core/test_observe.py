"""What operators scrape."""

import torch
from prometheus_client.parser import text_string_to_metric_families

import cam
import cam.observe
from tests.launcher import Ranks


def scrape(group: cam.Group) -> tuple[dict[tuple[str, str], float], dict[str, int]]:
    kept = group.empty((4096,), torch.uint8)
    for _ in range(3):
        group.barrier()
    values = {}
    for family in text_string_to_metric_families(cam.observe.prometheus_text()):
        for sample in family.samples:
            if (sample.labels["group"], sample.labels["rank"]) == (group.name, str(group.rank)):
                values[sample.name, sample.labels.get("operation", sample.labels.get("kind"))] = sample.value
    memory = group.memory()
    assert kept.numel() == 4096
    return values, memory


def test_operations_and_memory_are_reported() -> None:
    with Ranks(2, name="observed") as ranks:
        for values, memory in ranks.run(scrape):
            assert values["cam_operation_calls_total", "barrier"] >= 3
            waited = values["cam_operation_wait_seconds_total", "barrier"]
            assert 0 < waited <= values["cam_operation_seconds_total", "barrier"]
            for kind in ("allocated", "resident", "limit"):
                assert values["cam_window_bytes", kind] == memory[kind]
            assert memory["allocated"] >= 4096


def test_a_closed_group_is_not_reported() -> None:
    with cam.init(name="observed-alone") as group:
        group.barrier()
        assert 'group="observed-alone"' in cam.observe.prometheus_text()
    assert 'group="observed-alone"' not in cam.observe.prometheus_text()
