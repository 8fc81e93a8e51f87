"""Methods, properties and manners of a user's class: as they were, and what they multiply is quantized."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from tests.ir.result.models import (
    QUIET,
    Block,
    Chain,
    Config,
    Net,
    Pretrained,
    batch,
    check_ran,
    close,
    equal,
    far,
    made,
    runs,
    ways,
)

pytestmark = QUIET
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@ways
@pytest.mark.parametrize("called", [True, False])
def test_a_method_is_quantized(called: bool, way: str) -> None:
    model = Net()
    x = batch()
    plain, exact = model.encode(x), made(Net(), way, 32)
    assert equal(exact.encode(x), plain)
    result = made(Net(), way)
    if called:
        result(x)
    before = runs(result)
    h = result.encode(x)
    assert far(h, plain)
    check_ran(result, before, "stem", "blocks.0.one", "blocks.1.two")
    h.sum().backward()
    assert result.stem.weight.grad is not None and result.fc.weight.grad is None


@ways
def test_a_product_of_a_method_is_quantized(way: str) -> None:
    """`similarity` multiplies what two calls of `encode` return: a product that `forward` never meets."""

    class Plain(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.fc(x))

        def similarity(self, x: Tensor, y: Tensor) -> Tensor:
            return x @ y.t()

    model = Plain()
    x, y = torch.randn(5, 8), torch.randn(5, 8)
    assert equal(made(Plain(), way, 32).similarity(x, y), model.similarity(x, y))
    result = made(Plain(), way)
    result(x)
    output = result.similarity(x, y)
    assert far(output, model.similarity(x, y))
    assert any(view.op in ("matmul", "mm") and view.times_run for view in cpt_fx.inspect(result).quantizers)


@ways
def test_methods_of_a_parent_called_within_forward_and_outside(way: str) -> None:
    model = Net()
    result = made(Net(), way)
    x, y = batch(1), batch(2)
    assert far(result.similarity(x, y), model.similarity(x, y))
    assert equal(made(Net(), way, 32).similarity(x, y), model.similarity(x, y))


@ways
def test_sample_under_no_grad(way: str) -> None:
    result = made(Net(), way)
    before = runs(result)
    sample = result.sample(5)
    assert sample.shape == (5, 4) and not sample.requires_grad
    assert far(sample, Net().sample(5))
    check_ran(result, before, "stem", "fc")
    assert equal(made(Net(), way, 32).sample(5), Net().sample(5))


@ways
def test_config_and_properties(way: str) -> None:
    model = Net()
    result = made(model, way)
    assert result.config == model.config and result.width == 8
    result.stem = nn.Linear(6, 8, bias=False)
    assert result.width == 8 and model.stem.bias is not None
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = result.nothing_of_this_name
    with pytest.raises(AttributeError):
        result.width = 3


@ways
def test_own_train_and_parameters(way: str) -> None:
    class Frozen(Chain):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.backbone.eval()
            return self

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            return self.fc.parameters(recurse)

    result = made(Frozen(), way)
    result.train()
    assert result.training and result.fc.training and not result.backbone[0].training
    assert [id(p) for p in result.parameters()] == [id(result.fc.weight), id(result.fc.bias)]
    optimizer = torch.optim.SGD(result.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in result.named_parameters()}
    result(batch()).sum().backward()
    optimizer.step()
    moved = {name for name, value in result.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {"fc.weight", "fc.bias"}


class Manners(Chain):
    """Everything that Python asks of a container."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> nn.Module:
        return [self.backbone, self.mix, self.fc][index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([self.backbone, self.mix, self.fc])

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def __call__(self, x: Tensor, *, twice: bool = False) -> Tensor:
        y: Tensor = super().__call__(x)
        return 2 * y if twice else y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manners)

    def __hash__(self) -> int:
        return 5

    def extra_repr(self) -> str:
        return "with manners"


@ways
def test_special_methods(way: str) -> None:
    model = Manners()
    result, exact = made(model, way), made(Manners(), way, 32)
    assert len(result) == 3 and result[2] is result.fc and next(iter(result)) is result.backbone
    assert "fc" in result and "nothing" not in result and result == model and hash(result) == 5
    assert "with manners" in str(result)
    assert equal(exact(batch(), twice=True), model(batch(), twice=True))
    assert far(result(batch()), model(batch()))
    assert close(result(batch(), twice=True), 2 * result(batch()))


@ways
def test_a_call_of_forward_itself(way: str) -> None:
    result = made(Chain(), way)
    before = runs(result)
    output = result.forward(batch())
    assert far(output, Chain()(batch()))
    check_ran(result, before, "backbone.0", "fc")


@pytest.mark.slow
@ways
def test_a_users_call_that_goes_around_forward(way: str) -> None:
    class Direct(Chain):
        def __call__(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(torch.tanh(self.backbone(x)))
            return y

    model = Direct()
    assert equal(made(Direct(), way, 32)(batch()), model(batch()))
    assert far(made(Direct(), way)(batch()), model(batch()))


@ways
def test_class_and_static_methods_and_class_attributes(way: str) -> None:
    class Named(Chain):
        kind = "chain"

        @classmethod
        def build(cls) -> Any:
            return cls()

        @staticmethod
        def twice(x: Tensor) -> Tensor:
            return 2 * x

    result = made(Named(), way)
    assert result.kind == "chain" and torch.equal(result.twice(batch()), 2 * batch())
    new = result.build()
    assert isinstance(new, Named) and equal(new(batch()), Named()(batch()))


@ways
def test_the_manners_of_hugging_face(way: str, tmp_path: Path) -> None:
    model = Pretrained(Config(width=8))
    result, exact = made(model, way), made(Pretrained(Config(width=8)), way, 32)
    assert result.config.width == 8 and result.config is model.config
    assert result.get_input_embeddings() is result.embed
    assert torch.equal(exact.generate(IDS, 3), model.generate(IDS, 3))
    before = runs(result)
    assert result.generate(IDS, 2).shape == (2, 5)
    check_ran(result, before, "layer.one", "lm_head")
    if way != "symbolic":  # a graph of torch.fx is that of one way through the code: it refuses labels by name
        result(input_ids=IDS, labels=IDS)["loss"].backward()
    assert result.lm_head.weight is result.embed.weight is model.embed.weight
    with torch.no_grad():
        result.embed.weight.add_(1)
    result.save_pretrained(tmp_path)
    loaded = Pretrained.from_pretrained(tmp_path)
    assert equal(loaded(IDS), model(IDS)) and torch.equal(loaded.embed.weight, result.embed.weight)
    again = type(result).from_pretrained(tmp_path)
    assert equal(again(IDS), model(IDS))


@ways
def test_a_resize_of_embeddings(way: str) -> None:
    result = made(Pretrained(Config(width=8)), way)
    result(IDS)
    result.embed = nn.Embedding(13, 8)
    result.lm_head = nn.Linear(8, 13, bias=False)
    result.lm_head.weight = result.embed.weight
    output = result(IDS)["logits"]
    plain = cpt_fx.revert(result)
    assert output.shape == (2, 3, 13) and far(output, plain(IDS)["logits"])


@ways
def test_methods_added_to_the_class_and_the_instance_later(way: str) -> None:
    class Late(Chain):
        pass

    result = made(Late(), way)
    Late.features = lambda self, x: self.backbone(x)  # type: ignore[attr-defined]
    result.note = lambda: "mine"
    assert result.note() == "mine"
    plain: Any = Late()
    assert far(result.features(batch()), plain.features(batch()))


@ways
def test_helpers_that_hold_modules(way: str) -> None:
    """A list, a dict and a bound method that hold modules of the model lead to those of the result."""

    class Holding(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.listed = [self.backbone, self.fc]
            self.by_name = {"fc": self.fc}
            self.run = self.fc.forward

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.by_name["fc"](self.listed[0](x))
            return y

    model: Any = Holding()
    result = made(model, way)
    assert result.listed[1] is result.fc is result.by_name["fc"] and result.run.__self__ is result.fc
    assert model.listed[1] is model.fc is not result.fc
    assert far(result(batch()), model(batch()))
    assert far(result.run(torch.randn(3, 8)), model.run(torch.randn(3, 8)))


@ways
def test_a_deep_copy_of_a_users_own(way: str) -> None:
    class Counted(Block):
        def __deepcopy__(self, memo: Any) -> Any:
            new = type(self)(8)
            memo[id(self)] = new
            new.load_state_dict({k: v for k, v in self.state_dict().items() if "cpt_fx" not in k}, strict=True)
            return new

    model = Counted(8)
    x = torch.randn(4, 8)
    result = made(model, way)
    twin = copy.deepcopy(result)
    assert isinstance(twin, Counted)
    assert far(twin(x), model(x)) and close(twin(x), result(x))
