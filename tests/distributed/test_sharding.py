import pytest

from litgrpo.distributed.sharding import shard_dim, share_of


@pytest.mark.parametrize(
    ("shape", "chips", "dim"),
    [
        ((256_000, 2304), 8, 0),  # Gemma 2's embedding, by words
        ((2304, 9216), 8, 1),  # the larger one
        ((2048, 2048), 4, 0),  # of equal ones the first
        ((9000, 2304), 16, 1),  # the larger one is not even
        ((2304,), 8, 0),
        ((1023,), 1023, None),  # too small to be worth it
        ((1024,), 1024, 0),
        ((1025, 3), 4, None),  # nothing is even
        ((4096, 4096), 1, None),  # one chip holds everything
        ((), 8, None),
    ],
)
def test_the_largest_dimension_that_divides_evenly_is_divided(shape, chips, dim):
    assert shard_dim(shape, chips) == dim


def test_the_least_size_is_an_argument():
    assert shard_dim((8, 8), 8) is None
    assert shard_dim((8, 8), 8, min_size=64) == 0


def test_a_chip_holds_its_share_or_everything():
    assert share_of((16, 1024), 8) == 2 * 1024
    assert share_of((1025, 3), 4) == 1025 * 3
