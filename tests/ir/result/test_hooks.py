"""Hooks of users: before and after the transform, on every module, forward and backward, removed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import cpt_fx
from tests.ir.result.models import QUIET, Chain, Images, Net, batch, check_ran, close, equal, far, made, runs, ways
from tests.training import check_same, train_step

pytestmark = QUIET
WHERE = ["", "stem", "act", "blocks.0", "blocks.1.two", "blocks.1.mix", "heads.a", "fc"]
Install = Callable[[nn.Module, list[Any]], Any]


def shapes_of_both(seen: list[Any]) -> Callable[..., None]:
    def hook(module: nn.Module, given: Any, wanted: Any) -> None:
        seen.append([None if g is None else g.shape for g in (*given, *wanted)])

    return hook


def shapes(seen: list[Any]) -> Callable[..., None]:
    def hook(module: nn.Module, wanted: Any) -> None:
        seen.append([None if g is None else g.shape for g in wanted])

    return hook


KINDS: dict[str, Install] = {
    "forward": lambda m, seen: m.register_forward_hook(lambda module, args, output: seen.append(args[0].shape)),
    "pre": lambda m, seen: m.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape)),
    "with kwargs": lambda m, seen: m.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(sorted(kwargs)), with_kwargs=True
    ),
    "always": lambda m, seen: m.register_forward_hook(
        lambda module, args, output: seen.append(len(args)), always_call=True, prepend=True
    ),
    "backward": lambda m, seen: m.register_full_backward_hook(shapes_of_both(seen)),
    "backward pre": lambda m, seen: m.register_full_backward_pre_hook(shapes(seen)),
}


def twice(seen: list[int]) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen.append(1)
        return 2 * output

    return hook


def tripled(module: nn.Module, given: Any, wanted: Any) -> Any:
    return (3 * given[0],)


def step(model: nn.Module, seed: int = 7) -> Any:
    return train_step(model, (batch(seed),), {})


@pytest.mark.slow
@ways
@pytest.mark.parametrize("where", WHERE)
def test_hooks_see_what_they_see_on_the_plain_model(where: str, way: str) -> None:
    result, reference = made(Net(), way, 32), Net()
    check_same(step(result), step(reference))
    seen: list[dict[str, list[Any]]] = []
    handles = []
    for model in (result, reference):
        notes: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        seen.append(notes)
        handles += [install(model.get_submodule(where), notes[kind]) for kind, install in KINDS.items()]
    for seed in range(2):
        check_same(step(result, seed), step(reference, seed))
    assert seen[0] == seen[1] and {len(notes) for notes in seen[0].values()} == {2}
    for handle in handles:
        handle.remove()
    check_same(step(result, 3), step(reference, 3))
    assert {len(notes) for notes in seen[0].values()} == {2}


@ways
@pytest.mark.parametrize("where", WHERE[1:])
def test_a_hook_runs_with_the_quantizers(where: str, way: str) -> None:
    result = made(Net(), way)
    expected = result(batch())
    seen: list[Tensor] = []
    result.get_submodule(where).register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    before = runs(result)
    output = result(batch())
    assert close(output, expected) and len(seen) == 1
    check_ran(result, before, "stem", "blocks.0.one", "blocks.1.two", "fc")
    plain: list[Tensor] = []
    reference = Net()
    reference.get_submodule(where).register_forward_hook(lambda module, args, output: plain.append(output.detach()))
    reference(batch())
    assert far(seen[0], plain[0])


@ways
def test_a_hook_that_was_there_before(way: str) -> None:
    model = Net()
    seen: list[int] = []
    handle = model.fc.register_forward_hook(twice(seen))
    result = made(model, way)
    reference = made(Net(), "dynamo")
    assert close(result(batch())[0], 2 * reference(batch())[0])
    result(batch())
    assert len(seen) == 2
    assert len(cpt_fx.revert(result).fc._forward_hooks) == 1  # type: ignore[union-attr]
    handle.remove()
    assert len(model.fc._forward_hooks) == 0


@ways
def test_hooks_of_the_result_are_not_the_given_models(way: str) -> None:
    model = Net()
    result = made(model, way)
    result.fc.register_forward_hook(lambda module, args, output: 2 * output)
    result(batch())
    assert not model.fc._forward_hooks and equal(model(batch()), Net()(batch()))


@ways
def test_a_backward_hook_changes_gradients(way: str) -> None:
    """Of an inner layer, and by a tensor hook on what a layer returned."""
    result, reference = made(Net(), way, 32), Net()
    step(result)
    step(reference)
    for model in (result, reference):
        model.blocks[0].register_full_backward_hook(tripled)
        model.stem.register_forward_hook(lambda module, args, output: output.register_hook(lambda g: 2 * g) and None)
        model.fc.weight.register_hook(lambda grad: -grad)
    check_same(step(result), step(reference))


@pytest.mark.slow
@ways
def test_global_hooks(way: str) -> None:
    def names(model: nn.Module) -> list[str]:
        seen: list[str] = []
        handles = [
            torch_module.register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__)),
            torch_module.register_module_forward_pre_hook(lambda m, args: seen.append("pre " + type(m).__name__)),
            torch_module.register_module_full_backward_hook(lambda m, i, o: seen.append("back " + type(m).__name__)),
        ]
        try:
            step(model)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    result, reference = made(Net(), way), Net()
    result(batch())
    assert names(result) == names(reference)
    before = runs(result)
    step(result)
    check_ran(result, before, "stem", "fc")


@ways
def test_activation_statistics_of_every_layer(way: str) -> None:
    """What a first day brings: the shape and the mean of everything, by hooks over named_modules()."""

    def statistics(model: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        handles = []
        for name, module in model.named_modules():

            def note(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                if isinstance(output, Tensor):
                    found[name] = tuple(output.shape)

            handles.append(module.register_forward_hook(note))
        model(x)
        for handle in handles:
            handle.remove()
        return found

    x = torch.randn(4, 3, 8, 8)
    for make, value in ((Images, x), (Chain, batch())):
        result = made(make(), way)
        assert statistics(result, value) == statistics(make(), value)
        result(value)
        assert statistics(result, value) == statistics(make(), value)


@ways
def test_a_hook_that_raises(way: str) -> None:
    """An early exit by an exception, as feature extractors do it; nothing is left behind."""

    class StopHereError(Exception):
        pass

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        raise StopHereError

    result = made(Chain(), way)
    expected = result(batch())
    handle = result.backbone.register_forward_hook(stop)
    with pytest.raises(StopHereError):
        result(batch())
    handle.remove()
    assert close(result(batch()), expected) and far(expected, Chain()(batch()))


@ways
def test_hooks_of_state_dicts(way: str) -> None:
    result = made(Net(), way)
    seen: list[str] = []
    result.register_state_dict_post_hook(lambda module, state, prefix, meta: seen.append("saved"))
    result.register_load_state_dict_post_hook(lambda module, keys: seen.append("loaded"))
    result.load_state_dict(result.state_dict())
    assert seen == ["saved", "loaded"]
