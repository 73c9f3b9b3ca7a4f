"""On which devices the kernels may run at all. Knows device names; measures nothing."""

import platform
import re
from dataclasses import dataclass

import mlx.core as mx

from spec_kernels._build import backend

METAL_KNOWN = range(13, 17)  # M1 to M4
CUDA_KNOWN = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90")


@dataclass(frozen=True)
class Device:
    """What the rules and the key of a stored verdict look at.

    Attributes:
        backend: "metal", "cuda" or "cpu".
        architecture: such as "applegpu_g16s" or "sm_90".
        name: for people.
        system: operating system and its build.
    """

    backend: str
    architecture: str
    name: str
    system: str


@dataclass(frozen=True)
class Rule:
    """What may run on a device, and why.

    Attributes:
        allowed: whether the device's generation is known, so that the kernels may run.
        reason: why.
        measured: whether they have run on such hardware, so that they are on unless turned off.
    """

    allowed: bool
    reason: str
    measured: bool = False


def this_device() -> Device:
    """The device MLX computes on by default."""
    info = mx.device_info()
    return Device(
        backend=backend(),
        architecture=str(info.get("architecture", "unknown")),
        name=str(info.get("device_name", "unknown")),
        system=f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
    )


def rule_for(device: Device) -> Rule:
    """Rule for `device`: known generations are on, everything else is off until measured.

    A microbenchmark cannot see a stall: a comparable kernel won its race on the M5 and then held
    up real generations (kernels.md 5), so an unknown generation stays off whatever a race would
    say. The Metal kernels are verified by emulation only: there a known generation is allowed, for
    those who ask.
    """
    if device.backend == "cpu":
        return Rule(False, "no kernels for the CPU")
    if device.backend == "metal":
        found = re.fullmatch(r"applegpu_g(\d+)([a-z])", device.architecture)
        generation = int(found[1]) if found else -1
        if generation in METAL_KNOWN:
            return Rule(True, f"{device.architecture} is a known generation")
        return Rule(False, f"{device.architecture} is not a known generation (M1 to M4)")
    if device.architecture in CUDA_KNOWN:
        return Rule(True, f"{device.architecture} is a known generation", measured=True)
    return Rule(False, f"{device.architecture} is not one of {', '.join(CUDA_KNOWN)}")
