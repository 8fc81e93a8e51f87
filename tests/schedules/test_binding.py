"""Schedules drive the controllers they find in a model, and know nothing else of it."""

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator

import pytest

from cpt_fx.schedules import Bits, Schedule, Static, named


class Controller:
    is_precision_controller = True

    def __init__(self) -> None:
        self.schedule: Schedule | None = None
        self.seen: list[Bits] = []

    def attach(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def update(self) -> None:
        assert self.schedule is not None
        self.seen.append(self.schedule.bits(self.schedule.position))


class Layer:
    is_precision_controller = "not really"


class Model:
    def __init__(self, *controllers: Controller) -> None:
        self.controllers = controllers

    def modules(self) -> Iterator[object]:
        yield self
        yield Layer()
        yield from self.controllers


def schedule() -> Schedule:
    return named("LR", q_min=4, q_max=8, total_steps=10, cycles=2)


def test_controllers_follow_the_schedule() -> None:
    model, driver = Model(Controller(), Controller()), schedule()
    driver.step(2)
    driver.bind(model)
    driver.step()
    driver.step(2)
    driver.load_state_dict(schedule().state_dict())
    for controller in model.controllers:
        assert controller.schedule is driver
        assert [bits.weight for bits in controller.seen] == [6, 6, 4, 4]


def test_controllers_follow_a_position_that_is_set() -> None:
    controller, driver = Controller(), schedule()
    driver.bind(Model(controller))
    driver.position = 3
    driver.position = 2
    driver.reset()
    assert controller.seen == [schedule().bits(step) for step in (0, 3, 2, 0)]


def test_one_schedule_drives_several_models() -> None:
    first, second, driver = Controller(), Controller(), schedule()
    driver.bind(Model(first))
    driver.bind(Model(second))
    driver.bind(Model(second))  # again: no double updates
    driver.step()
    assert (len(first.seen), len(second.seen)) == (2, 3)


def test_unbind() -> None:
    controller, driver = Controller(), schedule()
    model = Model(controller)
    driver.bind(model)
    driver.unbind(model)
    driver.unbind(model)
    driver.step()
    assert len(controller.seen) == 1


@pytest.mark.slow
def test_a_model_that_is_gone_is_forgotten() -> None:
    controller, driver = Controller(), schedule()
    gone = weakref.ref(controller)
    driver.bind(Model(controller))
    del controller
    gc.collect()
    assert gone() is None
    driver.step()


def test_copies_leave_the_models_behind() -> None:
    controller, driver = Controller(), schedule()
    driver.bind(Model(controller))
    for clone in (copy.deepcopy(driver), copy.copy(driver), pickle.loads(pickle.dumps(driver))):
        clone.step()
    assert len(controller.seen) == 1
    driver.step()
    assert len(controller.seen) == 2


@pytest.mark.parametrize("method", ["bind", "unbind"])
def test_a_model_that_is_not_transformed_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match=r"not transformed: call cpt_fx\.transform\(model, schedule\) first"):
        getattr(Static(8), method)(Model())
    with pytest.raises(TypeError, match=r"model must be a module with a modules\(\) method, got int"):
        getattr(Static(8), method)(3)
