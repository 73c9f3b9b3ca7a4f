"""The kernels of a loaded target: the forward that is raced, and the watchdog's eyes."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from spec_core import Pair, generate
from spec_kernels import Installed, installation
from spec_kernels.hardware import this_device
from spec_kernels.layers import Switch
from spec_targets import acceleration, load_target
from spec_targets.acceleration import watched


def installed_kernels():
    """What `install` returns on a GPU, without layers."""
    return Installed(Switch(), this_device(), "known", [], [])


def test_the_raced_forward_leaves_its_cache_as_it_was(checkpoint, monkeypatch):
    given = {}

    def install(network, **options):
        given.update(options, network=network)
        return installed_kernels()

    monkeypatch.setattr(acceleration, "install", install)
    target, _ = load_target(checkpoint())
    assert given["network"] is target.model and given["mode"] == "auto"
    caches = []
    make_cache = target.make_cache
    target.make_cache = lambda: caches.append(make_cache()) or caches[-1]
    for rows in (1, 8, 16):
        given["forward"](rows)
        assert len(caches) == 1
        assert (caches[0].offset, caches[0].n_open) == (acceleration._CONTEXT, 0)
    target.make_cache = make_cache
    fresh = make_cache()
    ids = [i % target.vocab_size for i in range(acceleration._CONTEXT)]
    target.prefill(ids, fresh)
    token = mx.array([3], mx.int32)
    got, want = target.verify(token, caches[0]).logits, target.verify(token, fresh).logits
    assert mx.array_equal(got, want)


def test_a_stalled_verify_is_seen_through_the_rounds():
    target = SimpleNamespace(kernels=installed_kernels())
    rounds = [SimpleNamespace(kind="prefill", elapsed_s=99.0)]
    rounds += [SimpleNamespace(kind="plain", elapsed_s=0.05)] * 20
    assert list(watched(rounds, target)) == rounds
    assert target.kernels.report().reason == "known"
    stalled = [*rounds[-10:], SimpleNamespace(kind="verify", elapsed_s=5.0)]
    assert list(watched(stalled, target)) == stalled
    assert "a verify took 5.00 s" in target.kernels.report().reason


def test_a_target_of_somebody_else_is_left_alone(checkpoint):
    target, _ = load_target(checkpoint())
    pair = Pair(target, None)
    plain = [r.tokens for r in generate(pair, [1, 2, 3], max_tokens=6)]
    foreign = SimpleNamespace()
    assert [r.tokens for r in watched(generate(pair, [1, 2, 3], max_tokens=6), foreign)] == plain


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_a_cpu_installs_nothing_and_says_why(checkpoint, mode):
    if this_device().backend != "cpu":
        pytest.skip("needs a CPU as the default device")
    target, _ = load_target(checkpoint(), kernels=mode)
    report = target.kernels.report()
    assert (report.on, report.ops) == (False, ())
    assert report.reason == ("turned off" if mode == "off" else "no kernels for the CPU")
    assert installation.this_device is this_device
