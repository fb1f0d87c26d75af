"""Python's garbage collector beside training.

After the first attempt half a million objects are alive, most of them of compiled graphs, and stay so. A full
collection visits each: a third of a second, once in some forty micro-batches, in which the host launches nothing.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def long_lived_objects() -> Iterator[Callable[[], None]]:
    """Yields a function that leaves all objects of the moment out of later collections, until the block ends.

    Call it when what lives long is there: after the first attempt.
    """

    def keep() -> None:
        gc.collect()  # what is garbage now would never be found
        gc.freeze()

    try:
        yield keep
    finally:
        gc.unfreeze()
