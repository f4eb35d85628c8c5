"""DeepSpeed's default for torch.distributed."""

from deepspeed.accelerator import get_accelerator

from cam.errors import BackendUnavailable

BACKEND = "cam"


def use_cam() -> str:
    """Makes the accelerator's communication_backend_name() answer cam, from now on in this process; returns it.

    DeepSpeed asks for it where neither the program nor its caller names a backend: init_distributed() and initialize().
    With the CPU accelerator it is "cam". With any other it is "cpu:cam,<device>:<vendor's>": tensors on the CPU go
    through cam, tensors on the device stay with the vendor's engine (not run on hardware).

    Nothing else of the accelerator changes. Raises BackendUnavailable where it does not take the name.
    """
    accelerator = get_accelerator()
    device, vendor = accelerator.device_name(), accelerator.communication_backend_name()
    if BACKEND in vendor:
        return str(vendor)
    name = BACKEND if device == "cpu" else f"cpu:{BACKEND},{device}:{vendor}"
    accelerator._communication_backend_name = name  # every accelerator of DeepSpeed answers with it
    if accelerator.communication_backend_name() != name:
        raise BackendUnavailable(
            f"{type(accelerator).__name__}.communication_backend_name() still answers "
            f"{accelerator.communication_backend_name()!r} after it was set to {name!r}; pass dist_backend={name!r} to "
            "deepspeed.init_distributed instead"
        )
    return name
