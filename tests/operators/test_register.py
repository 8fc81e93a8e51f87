"""An operator of another package, registered from outside: quantized, excluded, costed, shown, proven."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import cpt_fx
from cpt_fx import operators
from cpt_fx.inspection.census import INSIDE
from cpt_fx.ir.aliasing import overwritten
from cpt_fx.operators import table
from tests.operators.row_verdicts import FRONTENDS, SCHEDULE, Call, transformed, verdict

LIBRARY = torch.library.Library("outside", "DEF")
LIBRARY.define("gated(Tensor x, Tensor weight, *, float gate=1.0) -> Tensor")
LIBRARY.define("gated.shifted(Tensor x, Tensor weight, Tensor shift) -> Tensor")
LIBRARY.define("halves(Tensor x, Tensor weight) -> (Tensor, Tensor)")
LIBRARY.impl("halves", lambda x, weight: (x @ weight[:, :1], x @ weight[:, 1:]), "CompositeImplicitAutograd")
LIBRARY.define("gathered(Tensor(a!) target, Tensor x, Tensor weight) -> ()")
LIBRARY.impl("gathered", lambda target, x, weight: (target.add_(x @ weight), None)[1], "CompositeImplicitAutograd")
LIBRARY.define("several(Tensor?[] xs, Tensor[] weights) -> Tensor")
LIBRARY.impl("several", lambda xs, weights: xs[0] @ weights[0], "CompositeImplicitAutograd")
LIBRARY.define("swapped(Tensor x, Tensor weight) -> Tensor")
LIBRARY.define("swapped.other(Tensor weight, Tensor x) -> Tensor")
for _name in ("gated", "gated.shifted"):
    LIBRARY.impl(_name, lambda x, weight, shift=0.0, gate=1.0: (x @ weight + shift) * gate, "CPU")
    torch.library.register_fake(f"outside::{_name}")(
        lambda x, weight, shift=0.0, gate=1.0: x.new_empty(x.shape[0], weight.shape[1])
    )


def _keep(ctx: Any, inputs: Any, keyword_only_inputs: Any = None, output: Any = None) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return grad @ weight.T, x.T @ grad


torch.library.register_autograd("outside::gated", _backward, setup_context=_keep, lib=LIBRARY)
GATED = torch.ops.outside.gated
FLOPS = 2 * 3 * 3 * 3


def count(x: Any, weight: Any, *rest: Any, out_shape: Any, **options: Any) -> int:
    return 2 * int(x[0]) * int(x[1]) * int(weight[1])


@operators.whole
def doubled(x: Tensor, weight: Tensor) -> Tensor:
    """A function of a package, kept whole."""
    return (x @ weight) * 2


@pytest.fixture
def registered() -> Iterator[None]:
    """Register as a package would when it is imported, and take it back."""
    handles = [
        operators.register(GATED, family="linear", operands={"x": "input", "weight": "weight"},
                           output_axes={"weight": 1}, flops=count),
        operators.register(doubled, operands={"x": "either", "weight": "either"}),
    ]  # fmt: skip
    yield
    for handle in handles:
        handle.remove()


def call(function: Any, **more: Any) -> Call:
    weight = torch.eye(3) + torch.linspace(0, 1, 9).reshape(3, 3)
    return Call(function, torch.linspace(-1, 1, 9).sin().reshape(3, 3), weight, **more)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("function", [GATED, GATED.default, doubled], ids=["packet", "overload", "function"])
def test_it_is_quantized(function: Any, frontend: str, registered: None) -> None:
    if frontend == "program" and function is doubled:
        pytest.skip("torch.export looks into functions: their products are the program's")
    ((op, family, has_gradient, *operands),) = verdict(transformed(call(function), frontend))
    assert (op, family, has_gradient) == ("doubled" if function is doubled else "gated", "linear", True)
    assert [(name, role) for name, role, *_ in operands] == [("x", "activation"), ("weight", "weight")]
    assert function is doubled or operands[1][3] == (1,)


def test_auto_and_keywords_and_other_overloads(registered: None) -> None:
    wanted = verdict(transformed(call(GATED), "symbolic"))
    assert verdict(transformed(call(GATED, gate=2.0), "auto")) == wanted
    shifted = Call(GATED.shifted, torch.randn(3, 3), torch.eye(3), torch.randn(3))
    for frontend in FRONTENDS:
        assert verdict(transformed(shifted, frontend)) == wanted
    by_name = call(lambda x, weight: GATED(weight=weight, x=x))
    assert verdict(transformed(by_name, "symbolic")) == wanted


def test_it_trains_and_the_proof_sees_it(registered: None) -> None:
    model = call(GATED)
    result = cpt_fx.transform(model, SCHEDULE, capture="symbolic", example_inputs=(model.example,))
    result(model.example).sum().backward()
    assert model.get_parameter("w1").grad is not None
    proof = cpt_fx.inspect(result).verify(model.example, gradients=False)
    assert proof.proven and "gated" in str(cpt_fx.inspect(result))
    with cpt_fx.at_bits(result, 32):
        assert torch.equal(result(model.example), model(model.example))


def test_it_is_excluded_by_name(registered: None) -> None:
    found = verdict(transformed(call(GATED), "symbolic", exclude=["calls.call.gated"]))
    assert found == (("gated", "excluded by 'calls.call.gated'", ""),)


def test_it_is_costed(registered: None) -> None:
    model = call(GATED)
    result = cpt_fx.transform(model, SCHEDULE, capture="symbolic")
    priced = cpt_fx.cost(result, SCHEDULE, (model.example,))
    assert {layer.name: layer.flops for layer in priced.layers}["gated"] == FLOPS
    assert operators.factors(GATED.default) == operators.factors(GATED.shifted) == (0, 1)


def test_one_that_does_not_say_what_it_costs_is_no_zero() -> None:
    handle = operators.register(GATED, operands={"x": "either", "weight": "either"})
    try:
        model = call(GATED)
        result = cpt_fx.transform(model, SCHEDULE, capture="symbolic")
        with pytest.raises(ValueError, match="outside::gated does not say what it costs: pass flops="):
            cpt_fx.cost(result, SCHEDULE, (model.example,))
    finally:
        handle.remove()


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_one_that_is_left_shows_its_reason(frontend: str) -> None:
    handle = operators.register("outside::gated", left="its codes are packed")
    try:
        assert verdict(transformed(call(GATED), frontend)) == (("gated", "its codes are packed", ""),)
    finally:
        handle.remove()


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_one_that_nobody_registered_is_listed(frontend: str) -> None:
    ((_, reason, _),) = verdict(transformed(call(GATED), frontend))
    assert reason == "a custom operator; what it multiplies is not seen"


def test_removing_forgets_it() -> None:
    before = set(operators.FORMS)
    handle = operators.register(GATED, operands={"x": "input"}, flops=count)
    assert set(operators.FORMS) > before
    handle.remove()
    handle.remove()
    assert set(operators.FORMS) == before and operators.factors(GATED.default) == ()


class Squared(torch.autograd.Function):
    """Has no row of its own: it is called by a function that has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Multiply."""
        return x @ x


@pytest.mark.parametrize(("function", "options", "message"), [
    (GATED, {"operands": {"y": "input"}}, "outside::gated has no argument 'y' that has a position, only x, weight"),
    (GATED, {"operands": {"gate": "input"}}, "no argument 'gate' that has a position"),
    (GATED, {"operands": {"x": "inputs"}}, '"input"'),
    (GATED, {"operands": {"x": "input"}, "family": "linaer"}, 'Did you mean "linear"'),
    (GATED, {}, "either operands=.*or left="),
    (GATED, {"operands": {"x": "input"}, "left": "no"}, "either operands=.*or left="),
    (torch.mm, {"left": "no"}, "does not say what its arguments are"),
    (torch.ops.aten.mm, {"operands": {"self": "input"}}, "in the list of operators already"),
    ("outside::nothing", {"left": "no"}, "no operator 'outside::nothing': import what defines it"),
    (torch.ops.outside.swapped, {"operands": {"x": "input"}}, "do not have 'x' at one place: register each"),
    (operators.whole(lambda x, n: x), {"operands": {"x": "input"}, "flops": count}, "is a function"),
    (lambda x, n: x, {"operands": {"x": "input"}}, "is not kept whole by torch.fx and Dynamo: mark a function"),
    (torch.nn.Linear, {"left": "no"}, "Linear is not kept whole by torch.fx and Dynamo: mark a function"),
    (Squared.apply, {"operands": {"x": "input"}}, "does not say .*pass an operator, or a function that is marked"),
    (lambda *xs: xs, {"left": "no"}, "does not say what its arguments are"),
])  # fmt: skip
def test_errors_say_what_is_wrong(function: Any, options: dict[str, Any], message: str) -> None:
    before = set(operators.FORMS)
    with pytest.raises((ValueError, TypeError), match=message):
        operators.register(function, **options)
    assert set(operators.FORMS) == before


def test_twice_the_same_is_one_and_something_else_is_an_error(registered: None) -> None:
    operators.register(doubled, operands={"x": "either", "weight": "either"})
    with pytest.raises(ValueError, match="doubled is in the list of operators already, as another 'doubled'"):
        operators.register(doubled, operands={"x": "either"})


def test_overloads_of_other_order_are_registered_one_by_one() -> None:
    packet = torch.ops.outside.swapped
    handles = [
        operators.register(overload, operands={"x": "input", "weight": "weight"}, flops=count)
        for overload in (packet.default, packet.other)
    ]
    assert operators.row_for(packet.other).operands == ((0, "weight"), (1, "input"))  # type: ignore[union-attr]
    for handle in handles:
        handle.remove()


def test_a_list_of_tensors_is_an_operand() -> None:
    LIBRARY.define("joined(Tensor[] parts, float scale) -> Tensor")
    LIBRARY.impl("joined", lambda parts, scale: torch.linalg.multi_dot(parts) * scale, "CompositeImplicitAutograd")
    handle = operators.register("outside::joined", operands={"parts": "either"})
    model = Call(torch.ops.outside.joined, [torch.randn(3, 3), torch.eye(3)], 2.0)
    ((_, _, _, *operands),) = verdict(transformed(model, "symbolic"))
    assert [name for name, *_ in operands] == ["parts0", "parts1"]
    handle.remove()


@operators.whole
def first_of(parts: Any) -> Tensor:
    """Take a list."""
    made: Tensor = parts[0] @ parts[1]
    return made


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(("function", "given", "kinds"), [
    (torch.ops.outside.several, lambda x, weight: ([x], [weight]), {"xs": "input", "weights": "weight"}),
    (first_of, lambda x, weight: ([x, weight],), {"parts": "either"}),
], ids=["optional", "function"])  # fmt: skip
def test_lists_of_tensors_are_operands(function: Any, given: Any, kinds: Any, frontend: str) -> None:
    if frontend == "program" and function is first_of:
        pytest.skip("torch.export looks into functions: their products are the program's")
    handle = operators.register(function, operands=kinds)
    try:
        ((op, _, _, *operands),) = verdict(transformed(call(lambda x, weight: function(*given(x, weight))), frontend))
        assert op == function.__name__ and [role for _, role, *_ in operands] == ["activation", "weight"]
    finally:
        handle.remove()


def _summed_up(x: Tensor, weight: Tensor) -> Tensor:
    one, other = torch.ops.outside.halves(x, weight)
    return torch.cat([one, other], 1)


def _gathered(x: Tensor, weight: Tensor) -> Tensor:
    target = torch.zeros_like(x)
    torch.ops.outside.gathered(target, x, weight)
    return target


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(("name", "function"), [("halves", _summed_up), ("gathered", _gathered)])
def test_gradients_of_what_returns_several_tensors_or_none_are_listed(name: str, function: Any, frontend: str) -> None:
    handle = operators.register(f"outside::{name}", operands={"x": "input", "weight": "weight"})
    try:
        model = call(function)
        result = transformed(model, frontend)
        (listed,), ((op, _, has_gradient, *operands),) = [
            [note for note in verdict(result) if (len(note) == 3) is is_listed] for is_listed in (True, False)
        ]
        assert listed == (name, "it does not return one tensor: its gradients stay in full precision", "gradient")
        assert (op, has_gradient, len(operands)) == (name, False, 2)
        result([model.example])[0].sum().backward()
        cpt_fx.inspect(result).verify([model.example])
    finally:
        handle.remove()


def test_a_function_that_is_registered_returns_one_tensor() -> None:
    both = operators.whole(lambda x, weight: (x @ weight, x))
    assert len(both(torch.eye(3), torch.eye(3))) == 2
    handle = operators.register(both, operands={"x": "input", "weight": "weight"}, name="both")
    with pytest.raises(TypeError, match="both returns a tuple: a function with a row returns one tensor"):
        both(torch.eye(3), torch.eye(3))
    handle.remove()
    assert len(both(torch.eye(3), torch.eye(3))) == 2


@operators.whole
def squashed(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply again what it has computed."""
    return torch.tanh(x @ weight) @ weight


@torch.library.custom_op("outside::chained", mutates_args=())
def chained(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply twice, forward out of sight."""
    return x @ weight @ weight


@chained.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _chained_backward(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return grad @ weight.T @ weight.T, x.T @ grad @ weight.T + (x @ weight).T @ grad


torch.library.register_autograd("outside::chained", _chained_backward, setup_context=_keep)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("function", [squashed, chained], ids=["function", "operator"])
def test_what_its_code_multiplies_in_between_is_part_of_it_and_listed(function: Any, frontend: str) -> None:
    handle = operators.register(function, operands={"x": "either", "weight": "weight"})
    try:
        result = transformed(call(function), frontend)
        cpt_fx.inspect(result).verify([torch.randn(3, 3)])
        if not (frontend == "program" and function is squashed):  # of a function, torch.export saw the inside
            assert {item.reason for item in cpt_fx.inspect(result).uncovered} == {INSIDE}
    finally:
        handle.remove()


def test_an_operand_without_a_quantizer_is_found_in_a_registered_operator_too(registered: None) -> None:
    model = call(GATED)
    result = cpt_fx.transform(model, SCHEDULE, capture="symbolic")
    graph = cpt_fx.graphs(result)[0].graph
    (product,) = (node for node in graph.nodes if node.target in (GATED, GATED.default))
    product.args = (product.args[0].args[0], *product.args[1:])
    cpt_fx.graphs(result)[0].recompile()
    with pytest.raises(cpt_fx.VerificationError):
        cpt_fx.inspect(result).verify(model.example)


@operators.whole
def _fills(target: Tensor, source: Tensor) -> Tensor:
    return target.copy_(source @ source)


def test_a_function_that_overwrites_says_so(registered: None) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(doubled, (x, x))
    assert not overwritten(node, {})
    handle = operators.register(_fills, operands={"source": "either"}, mutates=("target",))
    assert overwritten(graph.call_function(_fills, (x, node)), {}) == [x]
    handle.remove()


def test_a_row_that_is_taken_out_leaves_the_kernels_of_others() -> None:
    name = "aten::_scaled_dot_product_flash_attention_backward"
    before = dict(table.KERNELS)
    assert before[name]
    operators.register(name, left="counted elsewhere").remove()
    assert before == table.KERNELS
