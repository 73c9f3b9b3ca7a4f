"""The rule of every device the project has an opinion on."""

import pytest

from spec_kernels.hardware import Device, rule_for, this_device


def device(backend: str, architecture: str) -> Device:
    return Device(backend, architecture, "name", "system")


@pytest.mark.parametrize("name", ["g13g", "g13s", "g14d", "g15s", "g16g", "g16s"])
def test_apple_generations_from_m1_to_m4_are_on(name):
    rule = rule_for(device("metal", f"applegpu_{name}"))
    assert rule.allowed and not rule.measured


@pytest.mark.parametrize("name", ["applegpu_g17g", "applegpu_g18s", "applegpu_g12p", "unknown"])
def test_other_apple_devices_are_off_until_measured(name):
    rule = rule_for(device("metal", name))
    assert not rule.allowed
    assert rule.reason == f"{name} is not a known generation (M1 to M4)"


@pytest.mark.parametrize(("name", "allowed"), [("sm_80", True), ("sm_90", True), ("sm_75", False),
                                               ("sm_100", False), ("sm_120", False)])  # fmt: skip
def test_nvidia_generations_are_on_where_the_instructions_are_known(name, allowed):
    rule = rule_for(device("cuda", name))
    assert rule.allowed == rule.measured == allowed


def test_a_cpu_has_no_kernels():
    rule = rule_for(device("cpu", "x86_64"))
    assert (rule.allowed, rule.reason) == (False, "no kernels for the CPU")


def test_this_device_names_itself():
    found = this_device()
    assert found.backend in ("cpu", "metal", "cuda")
    assert found.architecture and found.name and found.system
