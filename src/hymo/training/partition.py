"""The optimizer's partition under the path of the original design notes; the code is in ``hymo.optim.partition``."""

from hymo.optim.partition import Partition as Partition
from hymo.optim.partition import Row as Row
from hymo.optim.partition import partition as partition

__all__ = ["Partition", "Row", "partition"]
