"""What a call overwrites, told from the call alone, against what it did: every operator that can write in place."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import cpt_fx
from cpt_fx.ir.aliasing import overwritten
from cpt_fx.schedules import Static


def tensors() -> dict[str, Tensor]:
    """Return values to call an operator with."""
    generator = torch.Generator().manual_seed(0)
    floats = torch.rand(4, 4, generator=generator) + 0.5
    return {
        "x": floats, "y": floats.flip(0).contiguous(), "z": floats.T.contiguous(), "v": floats[0].clone(),
        "w": floats[1].clone(), "i": torch.tensor([[0, 1, 2, 3]] * 4), "j": torch.tensor([0, 1, 2, 3]),
        "b": floats > 1, "n": torch.arange(16).reshape(4, 4), "m": torch.arange(16).reshape(4, 4) + 1,
        "t": torch.rand(2, 4, 4), "u": torch.rand(2, 4, 4), "s": torch.tensor(0.5),
    }  # fmt: skip


VALUES = tensors()


class Value(str):
    """The name of a tensor in `tensors`."""


x, y, z, v, w, i, j, b, n, m, t, u, s = map(Value, "xyzvwijbnmtus")
CANDIDATES: tuple[tuple[Any, ...], ...] = (
    (x,), (x, y), (n, m), (x, 0.5), (n, 1), (b, b), (x, 1), (x, 0, 1), (x, y, z), (x, v, w), (v, x, w), (t, x, u),
    (x, t, u), (x, 0, j, y), (x, 0, j, 0.5), (x, 0, i, y), (x, 0, i, 0.5), (x, b, 0.5), (x, b, y), (x, (j,), v),
    (x, 0, i, y, "sum"), (x, 0, j, y, "mean"), (x, y, 0.5), (x, 2, 0, 1.0), (x, (4, 4)), (x, 0.1, 0.9), (x, None, 0.1),
    (n,), (x, "j", y), ([x, y],), ([x, y], [z, t]), ([x, y], 0.5), ([x, y], [z, y], [x, z]), (x, n), (x, i, y),
    (x, j), (x, lambda a: a), (x, y, lambda a, c: a), (x, 0.3, 0.1), (x, s), (x, 0), (x, 2, 0), (x, j, v), (v, v, w),
    (x, v, v, v, v, True, 0.1, 1e-5, True), (x, y, v, v), (x, j, 1.0, 2.0), (x, (0, 1)), (x, True), (b,),
)  # fmt: skip


def filled(given: Any, values: dict[str, Any]) -> Any:
    """Put values in the places of their names."""
    if type(given) in (tuple, list):
        return type(given)(filled(item, values) for item in given)
    return values[given] if type(given) is Value else given


def node_of(target: Any, args: Any, kwargs: dict[str, Any]) -> tuple[fx.Node, dict[str, fx.Node]]:
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in tensors()}
    args, kwargs = filled(args, nodes), {key: filled(value, nodes) for key, value in kwargs.items()}
    kind = "call_method" if isinstance(target, str) else "call_function"
    return graph.create_node(kind, target, args, kwargs), nodes


def called(target: Any, args: Any, kwargs: dict[str, Any]) -> set[str] | None:
    """Call an operator; return the names of what it has changed, None where it takes no such arguments."""
    before = {name: value._version for name, value in VALUES.items()}
    args, kwargs = filled(args, VALUES), {key: filled(value, VALUES) for key, value in kwargs.items()}
    function: Any = getattr(torch.Tensor, target) if isinstance(target, str) else target
    try:
        with torch.no_grad():
            function(*args, **kwargs)
    except Exception:
        return None
    changed = {name for name, value in VALUES.items() if value._version != before[name]}
    VALUES.update(tensors())  # as they were
    return changed


def missed(target: Any, args: Any, kwargs: dict[str, Any]) -> set[str]:
    """What was overwritten without being told."""
    node, nodes = node_of(target, args, kwargs)
    told = overwritten(node, {})
    return {name for name in called(target, args, kwargs) or () if nodes[name] not in told}


def writers() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Everything of torch that may write to an argument, in every way to call it that takes the same arguments."""
    updates = [name for name in dir(torch.Tensor) if name.startswith("__i") or name == "__setitem__"]
    methods = [name for name in dir(torch.Tensor) if name.endswith("_") and not name.endswith("__")]
    for name in (*updates, *methods):
        if name in ("__init__", "__init_subclass__", "resize_as_sparse_"):
            continue
        yield (name, getattr(torch.Tensor, name)), {}
    for home in (torch, F, nn.init, torch._C._nn):
        for name in dir(home):
            if name.endswith("_") and not name.startswith("_") and callable(getattr(home, name)):
                yield (getattr(home, name),), {}
    for name in dir(operator):
        if name.startswith("i") or name == "setitem":
            yield (getattr(operator, name),), {}
    for home in (torch, torch.linalg, torch.special):
        for name in filter(str.isidentifier, dir(home)):
            target, prefix = getattr(home, name), "" if home is torch else home.__name__.rpartition(".")[2] + "_"
            packet = getattr(torch.ops.aten, prefix + name, None)
            if isinstance(packet, torch._ops.OpOverloadPacket) and any("out" in name for name in packet.overloads()):
                yield (target,), {"out": u}
                yield (target,), {"out": (u, n)}
    for name in dir(F):
        function = getattr(F, name)
        if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters:
            yield (function,), {"inplace": True}
    for name in torch._C._dispatch_get_all_op_names():
        library, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        public = hasattr(torch.Tensor, packet) or hasattr(torch, packet) or hasattr(F, packet)
        if library != "aten" or packet.startswith(("_", "fused")) or not public:
            continue  # others do not check what they are given
        found = getattr(torch.ops.aten, packet)
        schema = getattr(found, overload or "default")._schema
        if schema.is_mutable:
            outs = [argument.name for argument in schema.arguments if argument.is_out]
            yield (getattr(found, overload or "default"), found), dict(zip(outs, (u, n, t, b), strict=False))


@pytest.mark.slow
def test_every_operator_that_writes_is_known_to() -> None:
    wrong, ran = [], set()
    for targets, kwargs in writers():
        args = next((args for args in CANDIDATES if called(targets[0], args, kwargs)), None)
        for target in targets if args is not None else ():
            ran.add(target)
            if missed(target, args, kwargs):
                wrong.append((target, args, kwargs, missed(target, args, kwargs)))
    assert not wrong
    assert len(ran) > 1000, f"only {len(ran)} operators wrote to anything"


class Writes(nn.Module):
    """Two layers read one tensor, and between them it is overwritten."""

    def __init__(self, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.register_buffer("shift", torch.full((4,), 3.0))
        self.register_buffer("spread", torch.full((4,), 4.0))
        self.table = nn.Parameter(torch.randn(6, 4) * 3)
        self.write = write

    def forward(self, x: Tensor) -> Any:
        z = x + 0.0
        shift: Any = self.shift
        skip = self.a(z) + F.linear(x, self.table)[:, :4] + torch.outer(x[:, 0], shift)
        self.write(self, z)
        return skip + self.b(z) + F.linear(x, self.table)[:, :4] + torch.outer(x[:, 0], shift)


@torch.library.custom_op("cpt_fx_tests::halve", mutates_args=("result",))
def halve(amount: float, result: Tensor) -> None:
    result.mul_(amount)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.mark_dirty(value)
        return value.mul_(2)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _hidden(value: Tensor) -> None:
    value.mul_(-2)


WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "relu, by place": lambda m, z: F.relu(z, True),
    "hardtanh, by place": lambda m, z: F.hardtanh(z, -0.1, 0.1, True),
    "dropout, by place": lambda m, z: F.dropout(z, 1.0, True, True),
    "threshold, by keyword": lambda m, z: F.threshold(input=z, threshold=0.3, value=9.0, inplace=True),
    "module": lambda m, z: m.drop(z),
    "dunder": lambda m, z: z.__imul__(-2.0),
    "method of the class": lambda m, z: torch.Tensor.mul_(z, -2.0),
    "packet": lambda m, z: torch.ops.aten.mul_(z, -2.0),
    "overload": lambda m, z: torch.ops.aten.mul_.Scalar(z, -2.0),
    "overload with a tensor": lambda m, z: torch.ops.aten.mul_.Tensor(z, z),
    "out": lambda m, z: torch.mul(z, -2.0, out=z),
    "out of ATen": lambda m, z: torch.ops.aten.mul.out(z, z, out=z),
    "two results": lambda m, z: torch.sort(z + 0.5, out=(z, torch.zeros(5, 4, dtype=torch.int64))),
    "a list": lambda m, z: torch._foreach_mul_([z], -2.0),
    "custom": lambda m, z: halve(-0.5, z),
    "custom, by keyword": lambda m, z: torch.ops.cpt_fx_tests.halve(result=z, amount=-0.5),
    "view": lambda m, z: z.view(-1)[:10].__iadd__(3.0),
    "item": lambda m, z: z.__setitem__(slice(0, 3), 7.0),
    "autograd function": lambda m, z: Doubles.apply(z),  # type: ignore[no-untyped-call]
    "hidden": lambda m, z: _hidden(z),
    "batch norm": lambda m, z: F.batch_norm(z, m.shift, m.spread, None, None, True, 0.9),
    "embedding": lambda m, z: F.embedding(torch.tensor([0, 1, 2, 3]), m.table, None, 0.1),
}


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("name", WRITES)
def test_a_layer_reads_what_was_written(name: str, capture: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(5, 4, generator=generator)
    for bits, tolerance in ((32, 0.0), (16, 0.01)):
        torch.manual_seed(1)
        expected = Writes(WRITES[name])
        torch.manual_seed(1)
        result = cpt_fx.transform(Writes(WRITES[name]), Static(bits), capture=capture)
        with torch.no_grad():
            ours, theirs = result(inputs), expected(inputs)
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("hidden", [False, True])
def test_an_operand_that_its_operator_overwrites_is_left_and_listed(capture: str, hidden: bool) -> None:
    """An embedding with `max_norm` shortens rows of its weight: of the weight, not of a quantized copy."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Parameter(torch.ones(6, 4)), nn.Embedding(6, 4, max_norm=0.5)
            self.head = nn.Linear(4, 2)

        def forward(self, index: Tensor) -> Any:
            found = F.embedding(index, self.table, None, 0.5) if hidden else self.layer(index)
            return self.head(found)

    recipe = cpt_fx.recipes.default().with_rule("embedding", weight=cpt_fx.formats.Format())
    result: Any = cpt_fx.transform(Model(), Static(3), recipe=recipe, capture=capture)
    result(torch.tensor([0, 1]))
    weight = result.table if hidden else result.layer.weight
    assert weight[:2].norm(dim=1).max() < 0.51 and weight[2:].norm(dim=1).max() > 0.6
    assert [item.operand for item in cpt_fx.inspect(result).uncovered] == ["weight"]
    assert "overwrites it" in cpt_fx.inspect(result).uncovered[0].reason
