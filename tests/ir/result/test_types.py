"""The result is the user's own tree: what asks for classes, children, attributes and text gets what it got before."""

from __future__ import annotations

import inspect
import math
import types
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from tests.ir.result.models import QUIET, Block, Chain, Images, Mixer, Net, batch, close, far, made, ways
from tests.training import snapshot

pytestmark = QUIET


def weight_decay_groups(model: nn.Module) -> list[set[str]]:
    """minGPT's: by the class of the module that a parameter lies in."""
    decay, no_decay = set[str](), set[str]()
    for module_name, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            if name.endswith("weight") and isinstance(module, (nn.Linear, nn.Conv2d)):
                decay.add(full)
            elif name.endswith("bias") or isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
                no_decay.add(full)
    return [decay, no_decay]


@ways
@pytest.mark.parametrize("make", [Net, Images, Chain])
def test_weight_decay_groups(make: type[nn.Module], way: str) -> None:
    result, plain = made(make(), way), make()
    assert weight_decay_groups(result) == weight_decay_groups(plain)
    names = {name for name, _ in result.named_parameters()}
    assert set.union(*weight_decay_groups(result)) == names


@ways
@pytest.mark.parametrize("make", [Net, Images, Chain])
def test_names_classes_and_order_of_modules(make: type[nn.Module], way: str) -> None:
    result, plain = made(make(), way), make()

    def named(model: nn.Module) -> list[tuple[str, str, str, str]]:
        return [
            (name, type(module).__name__, type(module).__module__, type(module).__qualname__)
            for name, module in model.named_modules()
        ]

    assert named(result) == named(plain)
    pairs = zip(result.modules(), plain.modules(), strict=True)
    assert all(isinstance(ours, type(theirs)) for ours, theirs in pairs)
    assert isinstance(result, make) and issubclass(type(result), make)
    assert [name for name, _ in result.named_children()] == [name for name, _ in plain.named_children()]
    assert [name for name, _ in result.named_parameters()] == [name for name, _ in plain.named_parameters()]


@ways
def test_the_given_model_keeps_its_classes(way: str) -> None:
    model = Net()
    before = snapshot(model)
    result = made(model, way)
    result(batch())
    result.fc = nn.Identity()
    result(batch())
    assert snapshot(model) == before
    assert type(model) is Net and all(type(block) is Block for block in model.blocks)
    assert type(model.blocks[0].mix) is Mixer


@ways
def test_initialisation_by_apply(way: str) -> None:
    seen: list[str] = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.ones_(module.bias)

    result = made(Chain(), way, 32)
    assert result.apply(init) is result
    assert sorted(seen) == sorted(type(module).__name__ for module in Chain().modules())
    assert torch.equal(result(batch()), torch.ones(5, 4))


@ways
def test_attributes_of_layers(way: str) -> None:
    images, chain = made(Images(), way), made(Chain(), way)
    assert (images.fc.in_features, images.fc.out_features) == (8, 4)
    assert images.conv.stride == (2, 2) and images.bn.momentum == 0.1 and images.drop.p == 0.2
    assert isinstance(chain.backbone[0], nn.Linear) and isinstance(chain.backbone[-1], nn.ReLU)
    assert len(chain.backbone) == 4 and len(list(chain.backbone)) == 4 and len(chain.backbone[:2]) == 2
    before = images.fc.weight.detach().clone()
    images.fc.reset_parameters()
    assert not torch.equal(images.fc.weight, before)
    bound = 1 / math.sqrt(8)
    assert float(images.fc.weight.detach().abs().max()) <= bound
    images.bn.reset_running_stats()
    assert int(images.bn.num_batches_tracked) == 0
    assert images.get_parameter("fc.weight") is images.fc.weight
    assert chain.backbone[0].extra_repr() == Chain().backbone[0].extra_repr()


@ways
def test_a_sequential_at_the_root(way: str) -> None:
    plain = Chain().backbone
    result = made(plain, way)
    assert isinstance(result, nn.Sequential) and len(result) == 4 and result[2].in_features == 8
    assert [type(layer).__name__ for layer in result] == [type(layer).__name__ for layer in plain]
    whole = result(batch())
    assert far(whole, plain(batch()))
    x = batch()
    for layer in result:
        x = layer(x)
    assert close(x, whole) or far(x, plain(batch()))
    result.append(nn.Linear(8, 3))
    assert result(batch()).shape == (5, 3) and len(result) == 5 and len(plain) == 4
    result[4] = nn.Identity()
    assert close(result(batch()), whole)
    del result[4]
    result.insert(0, nn.Linear(6, 6))
    assert len(result) == 5 and result(batch()).shape == (5, 8)


@ways
def test_print_is_about_as_long_as_that_of_the_plain_model(way: str) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    plain = str(model)
    result = made(model, way, example_inputs=(torch.randn(2, 4),))
    assert len(str(result)) <= 1.2 * len(plain) + 300
    assert str(result).count("Linear(in_features=4, out_features=4, bias=True)") == plain.count("Linear(in")
    assert str(result).startswith("Sequential(") and "Placeholder" not in str(result) and "Shell" not in str(result)


@ways
def test_signature_source_and_doc(way: str) -> None:
    class Documented(Net):
        """What a user says about it."""

        def forward(self, x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> Any:
            """Run it."""
            return self.fc(self.encode(x)) * scale

    result = made(Documented(), way)
    assert inspect.signature(result.forward) == inspect.signature(Documented().forward)
    assert inspect.signature(type(result).forward) == inspect.signature(Documented.forward)
    assert type(result).__doc__ == Documented.__doc__ and type(result).__qualname__ == Documented.__qualname__
    assert result.forward.__doc__ == "Run it." and result.forward.__name__ == "forward"
    assert result(batch(), scale=2.0).shape == (5, 4)
    assert inspect.signature(result.fc.forward) == inspect.signature(nn.Linear(1, 1).forward)
    with pytest.raises(TypeError):
        result(batch(), size=2.0)


@ways
def test_subclass_registries_see_nothing(way: str) -> None:
    class Registered(nn.Module):
        known: ClassVar[list[str]] = []

        def __init_subclass__(cls, *, key: str, **options: Any) -> None:
            super().__init_subclass__(**options)
            cls.known.append(key)

    class Mine(Registered, key="mine"):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(x)
            return y

    result = made(Mine(), way)
    result(batch())
    assert Registered.known == ["mine"] and isinstance(result, Registered)


@ways
def test_one_derived_class_for_one_class_of_the_users(way: str) -> None:
    first, second = made(Net(), way), made(Net(), way)
    for one in (first, second):
        one(batch())
    assert type(first) is type(second)
    assert type(first.blocks[0]) is type(first.blocks[1]) is type(second.blocks[0])
    assert type(first.stem) is type(first.fc)


@ways
def test_an_instance_of_the_class_of_a_result_is_a_users_model(way: str) -> None:
    result = made(Net(), way)
    new = type(result)(width=8, classes=3)
    assert isinstance(new, Net)
    assert torch.equal(new(batch())[0], Net(classes=3)(batch())[0])
    layer = type(result.fc)(6, 2)
    assert torch.equal(layer(batch()), nn.functional.linear(batch(), layer.weight, layer.bias))


@ways
def test_own_forward_of_a_base_class_and_multiple_inheritance(way: str) -> None:
    class Doubles:
        def forward(self, x: Tensor) -> Any:
            above: Any = super()
            return tuple(2 * tensor for tensor in above.forward(x))

    class Mixed(Doubles, Net):
        pass

    model: Any = Mixed()
    expected = model(batch())
    assert close(made(model, way, 32)(batch()), expected)
    result = made(model, way)
    assert far(result(batch()), expected)
    assert isinstance(result, Doubles)


@ways
def test_a_bound_method_of_the_result_belongs_to_it(way: str) -> None:
    result = made(Net(), way)
    for method in (result.encode, result.forward):
        assert isinstance(method, types.MethodType)
        assert method.__self__ is result


@ways
def test_a_type_is_equal_to_the_users(way: str) -> None:
    """`if type(m) == nn.Linear` is what the documentation of `apply` has."""
    result: Any = made(Net(), way)
    whole, part = (cast(Any, type(module)) for module in (result, result.fc))
    assert whole == Net and nn.Linear == part and part != nn.Conv2d
    assert part in (nn.Conv2d, nn.Linear) and {nn.Linear: 1}[part] == 1

    def ones(module: nn.Module) -> None:
        if type(module) == nn.Linear:  # noqa: E721
            nn.init.ones_(module.weight)

    result.apply(ones)
    assert bool((result.fc.weight == 1).all() and (result.blocks[0].one.weight == 1).all())


@ways
def test_metaclasses_see_nothing(way: str) -> None:
    known: dict[str, type] = {}

    class Register(type):
        def __new__(cls, name: str, bases: Any, body: Any, *, key: str) -> Any:
            assert key not in known
            made: Any = super().__new__(cls, name, bases, body)
            known[key] = made
            return made

        def __init__(cls, name: str, bases: Any, body: Any, *, key: str) -> None:
            super().__init__(name, bases, body)

    class Registered(Chain, metaclass=Register, key="registered"):
        pass

    result = made(Registered(), way)
    assert known == {"registered": Registered} and type(result).__name__ == "Registered"
    assert known["registered"] is Registered and isinstance(result, Registered)
    assert type(type(result)()) is Registered


@ways
def test_a_forward_that_calls_its_parents(way: str) -> None:
    """The class after the user's is found, also where the derived one is equal to it."""

    class Twice(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    result = made(Twice(), way, 32)
    assert torch.equal(result(batch()), Twice()(batch()))
    assert len(cpt_fx.graphs(result)) == 1
