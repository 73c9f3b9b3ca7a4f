"""Random lives of batches and of single caches beside them: graphs change no bit, nothing leaks."""

import gc
import math
import random
import threading
import weakref

import mlx.core as mx
import pytest

from spec_targets import compiled
from spec_targets.ragged import RaggedCache

MOST = 90  # positions, so that no sequence outgrows the stand-in's room
VOCAB = 61


class Life:
    """Sequences that join, leave, are frozen and go on, all drawn from a seed.

    Args:
        target: Whose sequences.
        seed: Of every choice.
        widths: Narrowest and widest block.
        fault: Makes forwards fail now and then; each is tried again until it succeeds.
    """

    def __init__(self, target, seed, widths=(1, 6), fault=None):
        self.target, self.rng, self.widths, self.fault = target, random.Random(seed), widths, fault
        self.found, self.frozen, self.singles = [], [], []
        self.batch = target.join([self.new() for _ in range(self.rng.randrange(1, 4))])

    def ids(self, *shape):
        drawn = mx.array([self.rng.randrange(VOCAB) for _ in range(math.prod(shape))], mx.int32)
        return drawn.reshape(shape)

    def new(self):
        cache = self.target.make_cache()
        prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, 20))]
        self.target.prefill(prompt, cache)
        return cache

    def change(self):
        """One of the things that may happen to a batch between two rounds."""
        target, rng, act, n = self.target, self.rng, self.rng.random(), len(self.batch.offsets)
        if act < 0.12 and n < 8:
            self.batch = target.join([self.batch, self.new()])
        elif act < 0.2 and n > 1:
            self.batch = target.select(self.batch, rng.sample(range(n), rng.randrange(1, n)))
        elif act < 0.3:
            cache = target.extract(self.batch, rng.randrange(n))
            frozen = target.freeze(cache)
            self.frozen.append((frozen, [array.tolist() for array in frozen.arrays()]))
            self.singles.append(cache)
        elif act < 0.38 and self.frozen:
            frozen, _ = rng.choice(self.frozen)
            self.singles.append(target.thaw(frozen, rng.randrange(1, frozen.offset + 1)))
        elif act < 0.5 and self.singles and n < 8:
            single = self.singles.pop(rng.randrange(len(self.singles)))
            self.batch = target.join([single, self.batch])

    def round(self):
        """A block for a single cache now and then, and one for all rows."""
        target, rng = self.target, self.rng
        at = rng.randrange(len(self.singles)) if self.singles and rng.random() < 0.4 else None
        if at is not None and self.singles[at].offset < MOST:
            width, before = rng.randint(*self.widths), target.freeze(self.singles[at])
            block = self.ids(width)

            def renew():
                self.singles[at] = target.thaw(before, before.offset)

            self.forward(lambda: target.verify(block, self.singles[at], taps=(0, 2)), renew)
            target.commit(self.singles[at], rng.randrange(width + 1))
            if rng.random() < 0.3:
                target.prefill([1, 2], self.singles[at])
        if max(self.batch.offsets) >= MOST:
            rest = [row for row, offset in enumerate(self.batch.offsets) if offset < MOST]
            both = rest or [self.new(), self.new()]
            self.batch = target.select(self.batch, rest) if rest else target.join(both)
        n, width = len(self.batch.offsets), rng.randint(*self.widths)
        block = self.ids(n, width)
        self.forward(lambda: target.verify_rows(block, self.batch, taps=(0, 2)))
        target.commit_rows(self.batch, [rng.randrange(width + 1) for _ in range(n)])

    def forward(self, verify, renew=lambda: None):
        while True:
            try:
                if self.fault is not None:
                    self.fault.on = True
                output = verify()
                break
            except (KeyboardInterrupt, RuntimeError, MemoryError):
                self.fault.on = False
                renew()
            finally:
                if self.fault is not None:
                    self.fault.on = False
        self.found += [output.logits, *output.taps]

    def run(self, n, after=lambda i: None):
        """All logits and taps of `n` rounds; what was frozen on the way must not have moved."""
        for i in range(n):
            after(i)
            self.change()
            self.round()
            if self.rng.random() < 0.5:
                mx.eval(self.found)
        mx.eval(self.found)
        for frozen, copies in self.frozen:
            assert [array.tolist() for array in frozen.arrays()] == copies
        return self.found


def assert_same(got, want):
    assert len(got) == len(want)
    assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("widths", [(1, 6), (1, 20), (3, 3)], ids=str)
def test_graphs_change_no_bit(serve, make_target, seed, widths):
    """Blocks wider than sixteen go the old way, with masks."""
    target = serve("llama")
    got = Life(target, seed, widths).run(40)
    assert_same(got, Life(serve("llama", graphs=False), seed, widths).run(40))
    plain = make_target("llama", layer_types=["full_attention"] * 3)
    for a, b in zip(got, Life(plain, seed, widths).run(40), strict=True):
        assert mx.allclose(a, b, rtol=1e-3, atol=1e-4)
    assert target._whole.serves and not target._compiled._never
    if widths == (3, 3):
        assert sum(kind.graph is not None for kind in target._compiled._kinds.values()) > 1


@pytest.mark.parametrize("seed", range(2))
def test_kernels_turned_off_in_the_middle_change_no_bit(serve, seed):
    def life(target):
        def after(i):
            if i == 25:
                target.kernels.disable("tried")

        return Life(target, seed, (2, 3)).run(40, after)

    assert_same(life(serve("llama")), life(serve("llama", graphs=False)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("where", ["layer", "write"])
def test_forwards_that_break_off_leave_no_trace_in_a_batch(serve, monkeypatch, where, seed):
    """Errors and interrupts in a layer, in traces and trials too, or while rows are written."""
    monkeypatch.setattr(compiled, "AGAIN_AFTER", 2)
    monkeypatch.setattr(compiled, "TRIED_AFTER", 2)
    want = Life(serve("llama", graphs=False), seed, (2, 3)).run(40)

    class Fault:
        on, n, rng = False, 0, random.Random(seed)

    def failing(own):
        def call(*arguments, **options):
            if Fault.on and Fault.rng.random() < 0.1:
                Fault.n += 1
                raise Fault.rng.choice([KeyboardInterrupt, RuntimeError, MemoryError])("tried")
            return own(*arguments, **options)

        return call

    target = serve("llama")
    rope = type(target.model.layers[0].self_attn.rope)
    of, name = (rope, "__call__") if where == "layer" else (RaggedCache, "write")
    monkeypatch.setattr(of, name, failing(getattr(of, name)))
    assert_same(Life(target, seed, (2, 3), Fault).run(40), want)
    assert Fault.n


@pytest.mark.parametrize("seed", range(2))
def test_races_and_graphs_that_come_and_go_change_no_bit(serve, monkeypatch, seed):
    monkeypatch.setattr(compiled, "RACED", 12)
    monkeypatch.setattr(compiled, "KEPT", 5)
    target = serve("llama")
    got = Life(target, seed, (2, 3)).run(80)
    assert_same(got, Life(serve("llama", graphs=False), seed, (2, 3)).run(80))
    assert len(target._compiled._kinds) == 5


def rows_of(target, n, length=5):
    caches = [target.make_cache() for _ in range(n)]
    for i, cache in enumerate(caches):
        target.prefill(list(range(1, length + 1 + i)), cache)
    return target.join(caches)


@pytest.mark.parametrize("first", ["alone", "batch"])
def test_a_batch_of_one_row_has_graphs_of_its_own(serve, first):
    target, want = serve("llama"), []
    block = mx.arange(4, dtype=mx.int32)
    for kind in [first, {"alone": "batch", "batch": "alone"}[first]]:
        batch, cache = rows_of(target, 1), target.make_cache()
        target.prefill([1, 2, 3, 4, 5], cache)
        for i in range(6):
            if kind == "alone":
                got = target.verify(block, cache).logits
                target.commit(cache, 2)
            else:
                got = target.verify_rows(block[None], batch).logits[0]
                target.commit_rows(batch, [2])
            want += [got] if kind == first else []
            assert mx.allclose(got, want[i], rtol=1e-4, atol=1e-5)
    graphs = [key for key, kind in target._compiled._kinds.items() if kind.graph]
    assert len(graphs) == 2 and target.replayed_rows == {4}


def test_a_trial_that_breaks_off_closes_the_blocks_it_opened(serve, monkeypatch):
    target = serve("llama")
    batch, block = rows_of(target, 3), mx.arange(6, dtype=mx.int32).reshape(3, 2)
    for _ in range(2):
        want = target.verify_rows(block, batch).logits
        target.commit_rows(batch, [0, 0, 0])
    mx.eval(want)
    own, seen = mx.eval, []

    def evaluate(*arrays):
        seen.append(arrays)
        if len(seen) == 2:  # what the model's own forward gave
            raise RuntimeError("out of memory")
        own(*arrays)

    monkeypatch.setattr(mx, "eval", evaluate)
    with pytest.raises(RuntimeError, match="out of memory"):
        target.verify_rows(block, batch)
    monkeypatch.setattr(mx, "eval", own)
    assert not batch.is_open
    assert mx.array_equal(target.verify_rows(block, batch).logits, want)


@pytest.mark.parametrize("graphs", [False, True])
def test_layers_that_share_keys_get_them_cut(serve, graphs):
    """They read what another layer fetched, and no cache tells them how full it is."""
    layers = ["full_attention"] * 4
    target = serve(
        "gemma4_text", layers, graphs=graphs, num_hidden_layers=4, num_kv_shared_layers=2
    )
    assert target.batch_refusal is None and not target._whole.serves


def test_batches_are_tried_again_with_kernels_that_come_later(serve):
    layers = ["full_attention"] * 4
    target = serve("gemma4_text", layers, num_hidden_layers=4, num_kv_shared_layers=2)
    kernels, target._whole = target.kernels, None
    assert target.batch_refusal is None and target._whole is None
    target.use_kernels(kernels)
    assert target.batch_refusal is None and not target._whole.serves


def test_graphs_keep_neither_their_target_nor_a_batch_alive(serve):
    target = serve("llama")
    batch, block = rows_of(target, 3), mx.arange(6, dtype=mx.int32).reshape(3, 2)
    for _ in range(8):
        mx.eval(target.verify_rows(block, batch).logits)
        target.commit_rows(batch, [1, 0, 2])
    assert any(kind.graph for kind in target._compiled._kinds.values())
    mx.eval([array for entry in batch.entries for array in entry.buffers])
    n_bytes, entry, model = batch.nbytes, weakref.ref(batch.entries[0]), weakref.ref(target.model)
    mx.clear_cache()
    before = mx.get_active_memory()
    del batch
    assert entry() is None and before - mx.get_active_memory() >= n_bytes
    del target
    gc.collect()
    assert model() is None


def test_what_is_replayed_can_be_asked_while_another_thread_replays(serve):
    target, over, found = serve("llama"), threading.Event(), []

    def ask():
        while not over.is_set() and not found:
            try:
                assert len(target.replayed_rows) < 7
            except Exception as error:
                found.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    Life(target, 0).run(60)
    over.set()
    asking.join()
    assert not found


@pytest.mark.parametrize("dtype", [mx.uint32, mx.int64])
def test_ids_of_another_type_change_no_bit(serve, dtype):
    target, own = serve("llama"), serve("llama", graphs=False)
    batches, block = [rows_of(t, 3) for t in (target, own)], mx.arange(6).reshape(3, 2)
    for i in range(8):
        ids = block.astype(mx.int32 if i < 5 else dtype)
        both = zip((target, own), batches, strict=True)
        got, want = (t.verify_rows(ids, batch).logits for t, batch in both)
        assert mx.array_equal(got, want)
        for t, batch in zip((target, own), batches, strict=True):
            t.commit_rows(batch, [1, 0, 2])
