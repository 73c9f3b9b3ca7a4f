"""The kernels of a loaded target: the forward that is raced, and the watchdog's eyes."""

import mlx.core as mx
import pytest

from spec_kernels import Installed, installation
from spec_kernels.hardware import this_device
from spec_kernels.layers import Switch
from spec_targets import acceleration, base, load, load_target


def installed_kernels():
    """What `install` returns on a GPU, without layers."""
    return Installed(Switch(16), this_device(), "known", [], [])


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


@pytest.mark.parametrize("size", [1, 2])
def test_a_part_of_a_split_model_tries_no_graphs(checkpoint, monkeypatch, size):
    """A trial is two forwards: the other processes would wait for their part of the second."""

    class Ranks:
        def size(self):
            return size

    monkeypatch.setattr(load, "_split", lambda *_: None)
    target, _ = load_target(checkpoint(), group=Ranks())
    assert (target._compiled is None) == (size > 1)


def test_a_stalled_block_turns_the_kernels_off(make_target, monkeypatch):
    """Between the forward and the commit the outcome was read, so a stall shows there."""
    target, now = make_target("llama"), [0.0]
    target.use_kernels(installed_kernels())
    monkeypatch.setattr(base.time, "perf_counter", lambda: now[0])
    cache = target.make_cache()
    target.prefill([1, 2, 3], cache)

    def round_of(rows, seconds):
        target.verify(mx.arange(rows, dtype=mx.int32), cache)
        now[0] += seconds
        target.commit(cache, 1)

    round_of(1, 99.0)  # a single row may have waited for whoever reads the text
    for _ in range(20):
        round_of(4, 0.05)
    assert target.kernels.report().reason == "known"
    round_of(4, 5.0)
    assert "a verify took 5.00 s" in target.kernels.report().reason


def test_a_stalled_batch_turns_them_off_too(make_target, monkeypatch):
    target, now = make_target("llama"), [0.0]
    target.use_kernels(installed_kernels())
    monkeypatch.setattr(base.time, "perf_counter", lambda: now[0])
    caches = [target.make_cache() for _ in range(2)]
    for cache in caches:
        target.prefill([1, 2, 3], cache)
    joined = target.join(caches)
    for seconds in [0.05] * 20 + [5.0]:
        target.verify_rows(mx.zeros((2, 3), mx.int32), joined)
        now[0] += seconds
        target.commit_rows(joined, [1, 1])
    assert "a verify took 5.00 s" in target.kernels.report().reason


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_a_cpu_installs_nothing_and_says_why(checkpoint, mode):
    if this_device().backend != "cpu":
        pytest.skip("needs a CPU as the default device")
    target, _ = load_target(checkpoint(), kernels=mode)
    report = target.kernels.report()
    assert (report.on, report.ops) == (False, ())
    assert report.reason == ("turned off" if mode == "off" else "no kernels for the CPU")
    assert installation.this_device is this_device
