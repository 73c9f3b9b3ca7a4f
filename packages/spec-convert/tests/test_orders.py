import numpy as np
import pytest

from spec_convert.errors import ConvertError
from spec_convert.orders import Half, Interleaved, Tiled


def test_half_split_rows_come_back():
    rows = np.arange(24)
    stored = rows.reshape(3, 2, 4).swapaxes(1, 2).reshape(-1)  # 3 heads, pairs side by side
    assert stored.tolist()[:4] == [0, 4, 1, 5]
    assert np.array_equal(stored[Interleaved(3).indices(24)], rows)


def test_value_heads_return_to_their_key_heads():
    rows = np.arange(4 + 3 * 2 * 5)
    heads = rows[4:].reshape(3, 2, 5)  # 3 key heads, 2 value heads each, 5 rows a head
    stored = np.concatenate([rows[:4], heads.swapaxes(0, 1).reshape(-1)])
    assert np.array_equal(stored[Tiled(4, 3, 2, 5).indices(len(rows))], rows)


def test_each_half_of_every_block_is_found():
    rows = np.arange(2 * 2 * 3)
    assert rows[Half(0, 2).indices(12)].tolist() == [0, 1, 2, 6, 7, 8]
    assert rows[Half(1, 2).indices(12)].tolist() == [3, 4, 5, 9, 10, 11]


@pytest.mark.parametrize(
    ("order", "n_rows", "words"),
    [
        (Interleaved(5), 24, "twice the 5 heads, got 24"),
        (Interleaved(0), 24, "twice the 0 heads"),
        (Tiled(4, 3, 2, 5), 30, "4 and 3 x 2 value heads of 5, got 30"),
        (Half(0, 3), 8, "twice the 3 blocks, got 8"),
    ],
)
def test_rows_that_do_not_divide_are_refused(order, n_rows, words):
    with pytest.raises(ConvertError, match=words):
        order.indices(n_rows)
