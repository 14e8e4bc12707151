"""The strategy's name for a plan, which looks at nothing else of it."""

from lightning.pytorch.strategies import SingleDeviceXLAStrategy


class XLASPMDStrategy(SingleDeviceXLAStrategy):
    """Never built.

    Args:
        min_shard_size: as in the real one.
    """

    def __init__(self, min_shard_size: int = 1024) -> None:
        raise AssertionError("plan builds nothing")
