"""pytest plugin of the CAM run: wherever vLLM's tests take the NixlConnector by name, they get CAM's connector.

The tests of load failures replace the scheduler's connector by a mock that decides what is loaded; there, CAM's real
scheduler half is put behind the mock: it sees every allocation, builds the metadata and filters the workers' reports.
"""

from typing import Any
from unittest.mock import Mock

import pytest


def pytest_configure(config: pytest.Config) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from cam_vllm import connector

    KVConnectorFactory._registry["NixlConnector"] = lambda: connector.CamConnector


def pytest_sessionstart(session: pytest.Session) -> None:
    from tests.v1.kv_connector.unit import utils

    utils.create_mock_connector = _mock_before_cam(utils.create_mock_connector)


def _mock_before_cam(create: Any) -> Any:
    def create_mock_connector() -> Mock:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from cam_vllm.connector import CamConnector
        from tests.v1.kv_connector.unit.utils import create_vllm_config, make_kv_cache_config

        config = create_vllm_config(kv_connector="NixlConnector")
        size = config.cache_config.block_size
        cam = CamConnector(config, KVConnectorRole.SCHEDULER, make_kv_cache_config(block_size=size, num_blocks=1))

        def after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens and request.kv_transfer_params is None:
                request.kv_transfer_params = {
                    "do_remote_prefill": True,
                    "remote_engine_id": "prefill",
                    "remote_request_id": request.request_id,
                    "remote_block_ids": list(range(-(-num_external_tokens // size))),
                    "remote_host": "prefill.invalid",
                    "remote_port": 1,
                    "remote_num_tokens": num_external_tokens,
                }
            cam.update_state_after_alloc(request, blocks, num_external_tokens)

        mock: Mock = create()
        mock.update_state_after_alloc.side_effect = after_alloc
        mock.build_connector_meta.side_effect = cam.build_connector_meta
        mock.update_connector_output.side_effect = cam.update_connector_output
        return mock

    return create_mock_connector
