"""Entry point `vllm.general_plugins`: runs in every vLLM process, several times, before arguments are parsed."""

NAME = "cam"


def register() -> None:
    """Makes the connector known as `cam` and adds --kv-connector and --kv-role. Idempotent.

    vLLM only logs what a plugin raises: an unsupported vLLM is refused here with a warning, and again, loudly, when the
    connector is made.
    """
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from cam_vllm import patches, versions

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "cam_vllm.connector", "CamConnector")
    versions.check(vllm.__version__)
    patches.add_command_line_options()
