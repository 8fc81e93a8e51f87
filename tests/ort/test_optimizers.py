"""Updates in ONNX Runtime against torch's own: same parameters after twenty updates; and what cannot be exported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import numpy as np
import onnx
import onnxruntime

from cpt_fx.errors import ExportError
from cpt_fx.export.manifest import Parameter
from cpt_fx.export.manifest import Tensor as Described
from cpt_fx.export.optimizers import Optimizer, optimizer_model, resolve_optimizer
from cpt_fx.ort import Trainer
from tests import ort

UPDATES = 20
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MakeOfAny = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd, weight decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05),
    "sgd, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd, momentum, weight decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05),
    "sgd, dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd, nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
    "sgd, groups": lambda p: torch.optim.SGD(_groups(p, lr=0.5, momentum=0.8), lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw, settings": lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.3),
    "adamw, no beta": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.0, 0.99)),
    "adamw, groups": lambda p: torch.optim.AdamW(_groups(p, weight_decay=0.0), lr=0.01),
}


def _groups(parameters: list[nn.Parameter], **options: float) -> list[dict[str, Any]]:
    """Two groups, the first one with options of its own."""
    return [{"params": parameters[:1], **options}, {"params": parameters[1:]}]


class Plain:
    """The optimizer graph alone: new values are written over the old ones, as the trainer does it."""

    def __init__(self, spec: Optimizer, parameters: dict[str, nn.Parameter]) -> None:
        described = [_described(name, value, spec) for name, value in parameters.items()]
        self.session = onnxruntime.InferenceSession(optimizer_model(spec, described).SerializeToString())
        self.values: dict[str, Tensor] = {}
        for item in self.session.get_inputs()[3:]:
            self.values[item.name] = torch.zeros(item.shape)
        for name, parameter in parameters.items():
            self.values[name] = parameter.detach().clone()
        self.binding = self.session.io_binding()
        for name, value in self.values.items():
            self.binding.bind_ortvalue_input(name, _shared(value))
        for item in self.session.get_outputs():
            self.binding.bind_ortvalue_output(item.name, _shared(self.values[item.name.removesuffix(".next")]))

    def update(self, rates: list[float], step: int, gradients: dict[str, Tensor], scale: float) -> None:
        for name, gradient in gradients.items():
            self.values[f"{name}_grad.accumulation.buffer"].copy_(gradient)
        self.binding.bind_cpu_input("learning_rate", np.array(rates, np.float64))
        self.binding.bind_cpu_input("step", np.array(step, np.int64))
        self.binding.bind_cpu_input("gradient_scale", np.array(scale, np.float32))
        self.session.run_with_iobinding(self.binding)


def _shared(value: Tensor) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(value.numpy())


def _described(name: str, value: Tensor, spec: Optimizer) -> Parameter:
    tensor = Described(name=name, dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape))
    return Parameter(tensor=tensor, trainable=value.requires_grad, group=spec.group_of([name]))


def _parameters() -> dict[str, nn.Parameter]:
    return {
        "a.weight": nn.Parameter(torch.randn(5, 3)),
        "b": nn.Parameter(torch.randn(7)),
        "c": nn.Parameter(torch.randn(())),
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_torch(name: str) -> None:
    parameters = _parameters()
    optimizer = OPTIMIZERS[name](list(parameters.values()))
    plain = Plain(resolve_optimizer(optimizer, parameters), parameters)
    for step in range(1, UPDATES + 1):
        gradients = {key: torch.randn_like(value) for key, value in parameters.items()}
        for key, value in parameters.items():
            value.grad = gradients[key].clone()
        optimizer.step()
        rates = [group["lr"] for group in optimizer.param_groups]
        plain.update(rates, step, {key: gradient * 4 for key, gradient in gradients.items()}, 0.25)
        for key, value in parameters.items():
            difference = (plain.values[key] - value.detach()).abs().max()
            assert difference < 2e-6, f"{key} at {step}: {difference}"


def test_remembered_values_equal_torch() -> None:
    """Not only the parameters: a resumed run depends on these."""
    parameters = _parameters()
    optimizer = torch.optim.AdamW(parameters.values())
    plain = Plain(resolve_optimizer(optimizer, parameters), parameters)
    for step in range(1, 6):
        gradients = {key: torch.randn_like(value) for key, value in parameters.items()}
        for key, value in parameters.items():
            value.grad = gradients[key].clone()
        optimizer.step()
        plain.update([1e-3], step, gradients, 1.0)
    for key, value in parameters.items():
        for state in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                plain.values[f"{key}.{state}"], optimizer.state[value][state], rtol=1e-6, atol=1e-9
            )


def test_small_epsilon_counts() -> None:
    """Where gradients vanish, epsilon decides; a float32 beta would show here, too."""
    value = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([value], lr=0.02, weight_decay=0.0)
    plain = Plain(resolve_optimizer(optimizer, {"p": value}), {"p": value})
    for step in range(1, UPDATES + 1):
        value.grad = torch.tensor([1e-8, 1e-10, 0.0])
        optimizer.step()
        plain.update([0.02], step, {"p": value.grad}, 1.0)
    torch.testing.assert_close(plain.values["p"], value.detach(), rtol=1e-6, atol=1e-7)
    assert value[0] < 0.9 < value[1] < value[2] == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ],
    ids=["sgd", "adamw"],
)
def test_a_whole_training_equals_torch(make: MakeOfAny, tmp_path: Path) -> None:
    """Another run, of the plain model in torch: 20 steps, in full precision."""
    directory = ort.with_optimizer(ort.net_directory(), tmp_path / "d", ort.net(), make)
    trainer = Trainer(directory, ort.full(), threads=1)
    model = ort.net()
    optimizer = make(model.parameters())
    for number in range(UPDATES):
        x, target = ort.batch(number)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        assert trainer.step(x, target) == pytest.approx(loss.item(), abs=1e-5)
    trained = trainer.state_dict()
    for name, value in model.state_dict().items():
        difference = (trained[name] - value).abs().max()
        assert difference < 2e-5, f"{name}: {difference}"
    assert trained["norm.num_batches_tracked"] == UPDATES


def test_the_graph_is_readable() -> None:
    parameters = _parameters()
    spec = resolve_optimizer("adamw", parameters)
    model = optimizer_model(spec, [_described(name, value, spec) for name, value in parameters.items()])
    nodes = [node for node in model.graph.node if node.domain == "cpt_fx"]
    assert [node.op_type for node in nodes] == ["AdamW"] * 3
    assert [node.name for node in nodes] == ["AdamW a.weight", "AdamW b", "AdamW c"]
    assert model.ir_version <= 10
    beta = next(attribute for attribute in nodes[0].attribute if attribute.name == "beta_2")
    assert onnx.numpy_helper.to_array(beta.t) == 0.999


def test_groups_and_names() -> None:
    model = ort.tied()
    names = dict(model.named_parameters(remove_duplicate=False))
    spec = resolve_optimizer(torch.optim.SGD([{"params": [model.head.weight], "lr": 0.5}], lr=0.1, momentum=0.9), names)
    assert spec.group_of(["embedding.weight"]) == spec.group_of(["head.weight"]) == 0
    assert spec.group_of(["frozen.weight"]) == -1
    assert spec.states == ("momentum_buffer",)
    assert spec.to_dict()["groups"] == [
        {"lr": 0.5, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
    ]
    assert resolve_optimizer(spec, names) is spec


def test_parameters_in_no_group_stay(tmp_path: Path) -> None:
    model = ort.net()
    directory = ort.with_optimizer(
        ort.net_directory(), tmp_path / "d", model, lambda _: torch.optim.SGD(model.last.parameters(), lr=0.5)
    )
    trainer = Trainer(directory, ort.full(), threads=1)
    before = trainer.state_dict()
    trainer.step(*ort.batch(0))
    after = trainer.state_dict()
    assert torch.equal(before["first.weight"], after["first.weight"])
    assert not torch.equal(before["last.weight"], after["last.weight"])


class Mine(torch.optim.SGD):
    """A subclass may do anything in its step."""


def _used(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: "adamww", 'Did you mean "adamw"'),
        (lambda p: torch.optim.Adagrad(p), "of type Adagrad"),
        (lambda p: Mine(p, lr=0.1), "of type Mine"),
        (lambda p: torch.optim.SGD, "of type type"),
        (lambda p: None, "of type NoneType"),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "maximize=True of the optimizer's parameter group 0"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))], lr=0.1), r"shape \(2, 2\) that is not one of"),
        (lambda p: torch.optim.SGD([p[0].requires_grad_(False)], lr=0.1), "nothing to train"),
        (_used, "has done steps already"),
    ],
)
def test_refused(make: Callable[[list[nn.Parameter]], Any], message: str) -> None:
    parameters = _parameters()
    with pytest.raises(ExportError, match=message):
        resolve_optimizer(make(list(parameters.values())), parameters)


def test_other_dtypes_are_refused() -> None:
    value = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    spec = resolve_optimizer("sgd", {"p": value})
    with pytest.raises(ExportError, match=r"the parameter p is of float64.*model\.float\(\)"):
        optimizer_model(spec, [_described("p", value, spec)])


def test_a_spec_is_data() -> None:
    spec = resolve_optimizer("sgd", _parameters())
    assert spec.name == "sgd" and spec.groups[0]["lr"] == 0.01 and spec.states == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "adamw"  # type: ignore[misc]
