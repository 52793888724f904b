"""Take the device that computes."""

from app import plugins
from app.devices import AcquiredDevice, Device
from app.graph import Lane, stage
from app.progress import Progress
from app.runtime import Runtime
from app.settings import Settings


@stage(Lane.DEVICE)
def acquire_device(settings: Settings, runtime: Runtime, progress: Progress) -> AcquiredDevice:
    """Give the device and its fingerprint; raises ResourceError when it is not to be had."""
    del runtime
    kind = "cpu" if settings.device.kind == "auto" else settings.device.kind
    device = plugins.load("app.devices", kind, Device).acquire(settings.device)
    progress.say(f"{device.kind}: {device.name}, {device.threads} threads")
    return AcquiredDevice(device, device.fingerprint())
