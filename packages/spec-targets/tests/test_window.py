import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache

from spec_targets.window import WindowCache


def rows(start, n):
    """Recognisable keys: row i holds the number i."""
    return mx.broadcast_to(mx.arange(start, start + n, dtype=mx.float32)[:, None], (1, 2, n, 4))


def held(fetched):
    return [int(x) for x in fetched[0][0, 0, :, 0].tolist()]


def attended(cache, n_rows, window=None):
    """Which positions each of the next rows may see, after writing them."""
    mask = cache.make_mask(n_rows, window_size=window, return_array=True)
    keys = held(cache.update_and_fetch(*2 * (rows(cache.offset, n_rows),)))
    table = mask.tolist() if mask is not None else [[True] * len(keys)] * n_rows
    return [[k for k, seen in zip(keys, line, strict=True) if seen] for line in table]


def test_each_row_sees_itself_and_the_rows_of_its_window():
    cache = WindowCache(4, slack=3)
    for n_rows in (3, 1, 5, 2, 1, 1, 7, 1):  # before, at and after the window is full
        start = cache.offset
        for i, seen in enumerate(attended(cache, n_rows)):
            position = start + i
            assert seen == list(range(max(0, position - 3), position + 1))


def test_a_smaller_window_of_the_model_holds_too():
    cache = WindowCache(6, slack=3)
    attended(cache, 9)
    assert attended(cache, 1, window=3) == [[7, 8, 9]]
    assert attended(cache, 2, window=3) == [[8, 9, 10], [9, 10, 11]]


def test_rows_taken_back_leave_no_trace_across_the_edge():
    cache = WindowCache(4, slack=3)
    for n_rows, n_back in ((5, 2), (1, 1), (6, 3), (3, 3), (2, 0), (4, 1), (1, 0)):
        attended(cache, n_rows)
        assert cache.trim(n_back) == n_back
        position = cache.offset
        assert attended(cache, 1)[-1] == list(range(max(0, position - 3), position + 1))


def test_more_rows_than_the_slack_are_refused_once_rows_are_gone():
    cache = WindowCache(4, slack=3)
    attended(cache, 3)
    assert cache.trim(3) == 3  # nothing was dropped yet
    for _ in range(12):
        attended(cache, 3)
    with pytest.raises(ValueError, match=r"At most 3 rows can be rolled back .* got 38"):
        cache.trim(38)  # 3 for the slack and 31 that align the window would have been held


def test_the_library_ring_holds_the_same_rows():
    ours, ring = WindowCache(5, slack=4), RotatingKVCache(max_size=5)
    for n_rows in (2, 1, 1, 1, 1, 4, 1, 1, 6, 1):
        new = rows(ours.offset, n_rows)
        assert (
            sorted(held(ours.update_and_fetch(new, new)))[-5:]
            == (sorted(held(ring.update_and_fetch(new, new)))[-5:])
        )


def test_another_layer_reads_what_was_fetched_last():
    cache = WindowCache(4, slack=3)
    with pytest.raises(ValueError, match="must write rows before another one can read"):
        cache.keys_and_values()
    for n_rows in (3, 2, 5, 1):
        new = rows(cache.offset, n_rows)
        assert held(cache.update_and_fetch(new, new)) == held(cache.keys_and_values())


def test_bytes_and_emptiness_are_told():
    cache = WindowCache(4, slack=2)
    assert cache.empty() and cache.nbytes == 0 and cache.is_trimmable()
    attended(cache, 3)
    # Keys and values: 2 heads x (4 + 31 + 2 x 2) rows x 4 channels of 4 bytes.
    assert not cache.empty() and cache.nbytes == 2 * 2 * 39 * 4 * 4


def test_what_is_returned_starts_at_a_multiple_of_32():
    cache = WindowCache(20, slack=4)
    for n_rows in (15, 1, 7, 1, 20, 1, 1, 33, 2, 9, 1, 1):
        before = cache.offset
        first = held(cache.update_and_fetch(*2 * (rows(before, n_rows),)))[0]
        assert first % 32 == 0 and first <= max(0, before - 19) < first + 32
