"""Python's garbage collector beside training."""

import gc

import pytest

from hymo.training.garbage import long_lived_objects
from hymo.training.trainer import Trainer


class Link:
    """An object that refers to itself: only the collector frees it."""

    def __init__(self):
        self.own = self


def visited() -> int:
    """Objects that a full collection visits."""
    return len(gc.get_objects())


def test_later_collections_leave_out_what_was_alive_and_take_it_in_again():
    kept = [Link() for _ in range(10_000)]
    before = visited()
    with long_lived_objects() as keep:
        assert visited() >= 10_000, "nothing is left out before the first attempt is done"
        keep()
        assert visited() < before - 10_000
    assert visited() >= 10_000
    del kept
    assert gc.collect() >= 10_000, "frozen objects are freed once training has ended"


def test_garbage_of_the_first_attempt_is_freed_not_kept():
    Link()
    with long_lived_objects() as keep:
        gc.collect()
        [Link() for _ in range(100)]
        keep()
        assert not any(type(x) is Link for x in gc.get_objects())
    assert not any(type(x) is Link for x in gc.get_objects())


def test_an_error_in_training_thaws_them_too():
    def fail():
        with long_lived_objects() as keep:
            keep()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert gc.get_freeze_count() == 0


def test_training_leaves_objects_out_from_its_first_attempt_to_its_end(small_config):
    trainer, frozen = Trainer(small_config), []
    train_step = trainer.train_step

    def noted():
        frozen.append(gc.get_freeze_count())
        return train_step()

    trainer.train_step = noted
    trainer.train()
    assert frozen[0] == 0 < min(frozen[1:]) <= max(frozen[1:]) == frozen[1], "once, not at every attempt"
    assert gc.get_freeze_count() == 0
