"""Updates in ONNX Runtime against torch's own: same parameters after twenty updates; and what cannot be exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx_ir as ir
import onnxruntime

from cpt_fx.errors import ExportError
from cpt_fx.export.updates import resolve_optimizer, trace_updates
from cpt_fx.ort import Trainer
from cpt_fx.ort.manifest import GRADIENT
from tests import ort

UPDATES = 20
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MakeOfAny = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd, weight decay": lambda p: SGD(p, lr=0.1, weight_decay=0.05),
    "sgd, momentum, weight decay": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05),
    "sgd, dampening": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd, nesterov, maximize": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05, maximize=True),
    "sgd, groups": lambda p: SGD(_groups(p, lr=0.5, momentum=0.8), lr=0.1),
    "sgd, a tensor as rate": lambda p: SGD(p, lr=torch.tensor(0.1)),
    "adam": lambda p: ADAM(p, lr=0.01, weight_decay=0.1),
    "adam, decoupled": lambda p: ADAM(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adamw": lambda p: ADAMW(p),
    "adamw, settings": lambda p: ADAMW(p, lr=0.05, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.3),
    "adamw, no beta": lambda p: ADAMW(p, lr=0.01, betas=(0.0, 0.99)),
    "adamw, amsgrad, maximize": lambda p: ADAMW(p, lr=0.01, amsgrad=True, maximize=True),
    "adamw, groups": lambda p: ADAMW(_groups(p, weight_decay=0.0), lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, t0=3),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "a subclass": lambda p: Mine(p, lr=0.1),
}


class Mine(torch.optim.SGD):
    """Somebody's own step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p]
                held["seen"] = held.get("seen", torch.zeros_like(p)) + p.grad.abs()
                p.sub_(group["lr"] * p.grad / (1 + held["seen"]))


def _groups(parameters: list[nn.Parameter], **options: float) -> list[dict[str, Any]]:
    """Two groups, the first one with options of its own."""
    return [{"params": parameters[:1], **options}, {"params": parameters[1:]}]


class Plain:
    """The update graphs alone: new values are written over the old ones where the manifest allows it."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
        resolved, groups = resolve_optimizer(optimizer, parameters)
        self.updates = trace_updates(resolved, parameters, groups)
        self.sessions = [_session(model) for model in (self.updates.first, self.updates.later)]
        self.values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self.swaps = {state.name for state in self.updates.remembered if state.swaps}
        for state in self.updates.remembered:
            zeros = torch.zeros([int(size) for size in state.shape], dtype=getattr(torch, state.dtype))
            given = self.updates.initial.get(state.name)
            self.values[state.name] = zeros if given is None else torch.from_numpy(given)

    def update(self, rates: list[float], step: int, gradients: dict[str, Tensor], scale: float) -> None:
        session = self.sessions[min(step, 1)]
        binding = session.io_binding()
        given = {
            **self.values,
            **{name + GRADIENT: gradient for name, gradient in gradients.items()},
            "learning_rate": torch.tensor(rates, dtype=torch.float64),
            "step": torch.tensor(float(step), dtype=torch.float64),
            "gradient_scale": torch.tensor(scale),
        }
        for item in session.get_inputs():
            binding.bind_ortvalue_input(item.name, _shared(given[item.name]))
        names = [item.name.removesuffix(".next") for item in session.get_outputs()]
        after = {name: self.values[name].clone() if name in self.swaps else self.values[name] for name in names}
        for name, value in after.items():
            binding.bind_ortvalue_output(name + ".next", _shared(value))
        session.run_with_iobinding(binding)
        self.values |= after


def _session(model: ir.Model) -> Any:
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


def _shared(value: Tensor) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(value.numpy())


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
    plain = Plain(optimizer, parameters)
    for step in range(UPDATES):
        gradients = {key: torch.randn_like(value) for key, value in parameters.items()}
        for key, value in parameters.items():
            value.grad = gradients[key].clone()
        optimizer.step()
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        plain.update(rates, step, {key: gradient * 4 for key, gradient in gradients.items()}, 0.25)
        for key, value in parameters.items():
            difference = (plain.values[key] - value.detach()).abs().max()
            assert difference < 2e-6, f"{key} at {step}: {difference}"


def test_remembered_values_equal_torch() -> None:
    """Not only the parameters: a resumed run depends on these."""
    parameters = _parameters()
    optimizer = torch.optim.AdamW(parameters.values())
    plain = Plain(optimizer, parameters)
    for step in range(5):
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
    plain = Plain(optimizer, {"p": value})
    for step in range(UPDATES):
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
    updates = trace_updates(*_resolved("adamw", parameters))
    nodes = [node for node in updates.later.graph if node.domain == "cpt_fx"]
    assert [node.op_type for node in nodes] == ["AdamW_0_2d", "AdamW_0_1d", "AdamW_0_0d"]
    assert [node.name for node in nodes] == ["update a.weight", "update b", "update c"]
    assert updates.later.ir_version <= 10
    assert [state.name for state in updates.remembered[:2]] == ["a.weight.exp_avg", "a.weight.exp_avg_sq"]


def _resolved(optimizer: Any, parameters: dict[str, nn.Parameter]) -> tuple[Any, dict[str, nn.Parameter], Any]:
    found, groups = resolve_optimizer(optimizer, parameters)
    return found, parameters, groups


def test_groups_and_names() -> None:
    model = ort.tied()
    names = dict(model.named_parameters(remove_duplicate=False))
    made = torch.optim.SGD([{"params": [model.head.weight], "lr": 0.5}], lr=0.1, momentum=0.9)
    optimizer, groups = resolve_optimizer(made, names)
    assert optimizer is made
    assert groups == {"embedding.weight": 0, "head.weight": 0}


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
        (lambda p: torch.optim.LBFGS(p), "LBFGS runs the model inside of its update"),
        (lambda p: torch.optim.SGD, "got type"),
        (lambda p: None, "got NoneType"),
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
    with pytest.raises(ExportError, match=r"the parameter p is of float64.*model\.float\(\)"):
        trace_updates(*_resolved("sgd", {"p": nn.Parameter(torch.zeros(2, dtype=torch.float64))}))
