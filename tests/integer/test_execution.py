"""Integer execution gives the numbers of simulated execution with the same recipe, up to the rounding of float32.

Formats, noise, and the order of the draws are the same, so that both multiply the same grid points. Simulated execution
rounds every product and every sum of them; integers round once. With sums of at most 100 terms the two differ by less
than 100 roundings of 6e-8 of the largest element, in practice by a few. One code that is off by one, at 8 bits, would
be a difference of 1/127 in one term: thousands of times more.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils.checkpoint import checkpoint

import cpt_fx
from cpt_fx import recipes
from cpt_fx.capture.standalone import precision_of
from cpt_fx.formats import Format, Group, Rounding, Scheme
from cpt_fx.integer import choice
from cpt_fx.integer.counts import ProductOutcome
from cpt_fx.integer.ops import INTEGER_LINEAR, TO_INTEGER
from cpt_fx.recipes import Recipe, Rule
from cpt_fx.schedules import Bits, Static
from tests.capture.programs import PROGRAM, program_of
from tests.integer.models import CODES, Convolutions, Encoder, always, both, counts, difference, products, set_widths
from tests.passes import Apply, numbers, only

__all__ = ["always"]
ROUNDING = 5e-6
PRODUCTS = products()


def agree(ours: nn.Module, theirs: nn.Module, *inputs: Tensor, within: float = ROUNDING) -> None:
    assert difference(numbers(ours, *inputs), numbers(theirs, *inputs)) < within


@pytest.mark.parametrize("bits", [(8, 8), (4, 8), (3, 3), (1, 1), (2, 8)], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_the_simulated_one(name: str, bits: tuple[int, int]) -> None:
    model, x = PRODUCTS[name]
    ours, theirs = both(model)
    for result in (ours, theirs):
        set_widths(result, *bits)
    agree(ours, theirs, x)
    assert counts(ours).tolist() == [[1, 0, 0, 0, 0, 0]] * 3


@pytest.mark.parametrize("name", PRODUCTS)
def test_above_8_bits_it_is_floating_point(name: str) -> None:
    model, x = PRODUCTS[name]
    ours, theirs = both(model)
    for bits in ((16, 16), (32, 32), (0, 0)):
        for result in (ours, theirs):
            set_widths(result, *bits)
        # The very operators of simulated execution, so that every bit is the same.
        assert difference(numbers(ours, x), numbers(theirs, x)) == 0
    assert counts(ours)[:, ProductOutcome.WIDTH].tolist() == [3, 3, 3]
    assert counts(ours).sum() == 9


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(
    ("bits", "integer"),
    [
        (Bits(4, 16, 8), (0, 1, 0)),
        (Bits(16, 4, 8), (0, 0, 1)),
        (Bits(4, 4, 16), (1, 0, 0)),
        (Bits(4, 4, 32), (1, 0, 0)),
    ],
    ids=str,
)
def test_each_product_decides_by_its_own_operands(name: str, bits: Bits, integer: tuple[int, int, int]) -> None:
    model, x = PRODUCTS[name]
    ours, theirs = both(model, bits)
    agree(ours, theirs, x)
    roles = {operand.role for view in cpt_fx.graphs(ours)[0].graph.nodes for operand in _operands(view)}
    if roles == {"activation", "weight"} and name not in ("weight on the left", "vector with matmul"):
        assert tuple(counts(ours)[:, ProductOutcome.INTEGER].tolist()) == integer
    assert counts(ours).sum() == 3


def _operands(node: Any) -> tuple[Any, ...]:
    decision = node.meta.get("cpt_fx_decision")
    return decision.operands if decision else ()


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["symbolic", PROGRAM, "dynamo"])
def test_whole_models_of_every_frontend(capture: str) -> None:
    """At 8 bits with few layers no value is so near to the middle of two codes that a rounding error decides."""
    tokens, images = torch.randint(0, 11, (3, 6)), torch.randn(3, 1, 8, 8)
    for model, x in ((Encoder(), tokens), (Convolutions(), images)):
        if capture == PROGRAM:
            ours, theirs = both(program_of(model, x), Bits(8, 8, 8))
        else:
            ours, theirs = both(model, Bits(8, 8, 8), capture=capture)
        ours(x), theirs(x)
        # More than rounding may move a few codes: still the same network, and not at all the one in full precision.
        found = difference(numbers(ours, x), numbers(theirs, x))
        set_widths(theirs, 32, 32)
        assert found < 0.02 < difference(numbers(ours, x), numbers(theirs, x))
        assert counts(ours)[:, 1:].sum() == 0


@pytest.mark.slow
def test_a_model_in_parts() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            torch._dynamo.graph_break()
            return self.b(h) @ h.t()  # type: ignore[no-any-return]

    x = torch.randn(5, 8)
    ours, theirs = both(Parts(), capture="dynamo")
    agree(ours, theirs, x)
    assert counts(ours).tolist() == [[3, 0, 0, 0, 0, 0]] * 3


def test_what_needs_no_gradient_gets_none() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model[0].weight.requires_grad_(False)
    ours, theirs = both(model)
    found = []
    for result in (ours, theirs):
        torch.manual_seed(0)
        y = result(torch.ones(3, 8))
        found.append([y, *torch.autograd.grad(y.sum(), [p for p in result.parameters() if p.requires_grad])])
    assert difference(*found) < ROUNDING
    # Nothing before the first layer is trained, and its weight is not: its bias alone gets a gradient.
    table = {name: value[:, 0].tolist() for name, value in precision_of(ours).products.named_buffers()}
    assert table == {"0": [1, 0, 0], "2": [1, 1, 1]}
    with torch.no_grad():
        assert not ours(torch.ones(3, 8)).requires_grad
    with torch.inference_mode():
        assert difference([ours(torch.ones(3, 8))], [theirs(torch.ones(3, 8))]) < ROUNDING
    assert counts(ours)[1:, 0].tolist() == [1, 1]


def test_shared_inputs_and_shared_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(h) + self.a(h) + h @ h.t() @ h  # type: ignore[no-any-return]

    ours, theirs = both(Tied())
    agree(ours, theirs, torch.randn(5, 8))
    assert counts(ours).tolist() == [[5, 0, 0, 0, 0, 0]] * 3
    readers = [node for node in cpt_fx.graphs(ours)[0].graph.nodes if "to_integer" in str(node.target)]
    assert [len(node.users) for node in readers] == [1, 3, 4, 1, 1]


def test_an_operand_that_is_overwritten_later_keeps_its_gradient() -> None:
    def model(self: Any, x: Tensor) -> Tensor:
        h = x * 2
        y = F.linear(h, self.w)
        return y + h.relu_()

    ours, theirs = both(Apply(model, w=torch.randn(8, 8)))
    agree(ours, theirs, torch.randn(5, 8))
    # The operators by themselves, with the change between quantizing and multiplying.
    leaf, weight, bits = torch.randn(5, 8, requires_grad=True), torch.randn(3, 8), torch.tensor(8)
    found = []
    for change in (False, True):
        x = leaf * 2
        codes = TO_INTEGER(x, bits)
        if change:
            x.relu_()
        result = INTEGER_LINEAR(codes, bits, TO_INTEGER(weight, bits), rounding="nearest")
        found.append(torch.autograd.grad(result.square().sum(), leaf)[0])
        # What carries the gradient keeps no memory.
        assert codes[0].shape == x.shape and codes[0].untyped_storage().nbytes() == 4
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["linear without bias", "addmm", "bmm", "conv2d"])
def test_a_result_may_be_overwritten(name: str) -> None:
    model, x = PRODUCTS[name]
    agree(*both(nn.Sequential(model, nn.ReLU(inplace=True))), x)


def test_checkpointing_runs_forward_again() -> None:
    ours, theirs = both(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    found = []
    for result in (ours, theirs):
        x = torch.ones(3, 8).requires_grad_()
        torch.manual_seed(0)
        y = checkpoint(result, x, use_reentrant=False)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *result.parameters()])])
    assert difference(*found) < ROUNDING
    assert counts(ours)[:, 0].tolist() == [4, 2, 2]


def test_copies_and_pickles() -> None:
    x = torch.randn(3, 8)
    ours, theirs = both(nn.Sequential(nn.Linear(8, 4)))
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        agree(copied, theirs, x)
        assert counts(copied).tolist() == [[1, 0, 0, 0, 0, 0]] * 3
    assert counts(ours).sum() == 0
    partly, _ = both(nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1)))
    copied = pickle.loads(pickle.dumps(partly))
    assert cpt_fx.inspect(copied).products == cpt_fx.inspect(partly).products


@pytest.mark.parametrize("name", ["linear", "bmm", "conv2d"])
def test_autocast_and_half_precision(name: str) -> None:
    """The products are exact until they are rounded to bfloat16, simulated ones are not: they agree to its rounding."""
    model, x = PRODUCTS[name]
    ours, theirs = both(model)
    found = []
    for result in (ours, theirs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.manual_seed(0)
            leaf = x.clone().requires_grad_()
            y = result(leaf)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), [leaf, *result.parameters()])])
    assert difference(*found) < 0.03
    assert found[0][0].dtype is torch.bfloat16
    low, also = both(copy.deepcopy(model).bfloat16())
    assert difference(numbers(low, x.bfloat16()), numbers(also, x.bfloat16())) < 0.03
    assert counts(low).tolist() == counts(ours).tolist() == [[1, 0, 0, 0, 0, 0]] * 3


def test_float64_stays_exact() -> None:
    ours, theirs = both(nn.Sequential(nn.Linear(8, 4)).double())
    assert difference(numbers(ours, torch.randn(3, 8).double()), numbers(theirs, torch.randn(3, 8).double())) > 0
    x = torch.randn(3, 8).double()
    assert difference(numbers(ours, x), numbers(theirs, x)) == 0
    assert counts(ours)[:, ProductOutcome.NO_CODES].tolist() == [2, 2, 2]
    (view,) = cpt_fx.inspect(ours).products
    assert "float64" in view.reasons[0] and not view.on_integers


def test_empty_batches() -> None:
    ours, theirs = both(nn.Sequential(nn.Linear(8, 4)))
    for mine, other in zip(numbers(ours, torch.ones(0, 8)), numbers(theirs, torch.ones(0, 8)), strict=True):
        assert torch.equal(mine, other)
    assert counts(ours)[0].tolist() == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("images", [0, 3])
def test_a_proof_takes_a_convolution_that_is_not_multiplied_on_integers(images: int) -> None:
    """To both gradients one factor gives its shape alone: no number of it may look like one that nobody quantized."""
    model = nn.Sequential(nn.Conv2d(7, 5, (3, 2)), nn.Tanh(), nn.Conv2d(5, 6, 2))
    ours, _ = both(model)
    with choice.chosen("never"):
        for _ in range(3):
            litter = [torch.full((size,), 3.7) for size in (1, 1, 1, 8, 64)]  # what new memory would hold
            del litter
            assert cpt_fx.inspect(ours).verify(torch.randn(images, 7, 6, 5)).products == 5
    assert not counts(ours)[:, ProductOutcome.INTEGER].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["linear", "matmul in four dims", "conv2d"])
def test_numbers_that_are_none_stay_visible(name: str, bad: float) -> None:
    model, x = PRODUCTS[name]
    x = x.clone()
    x.view(-1)[3] = bad
    ours, theirs = both(model)
    found = [numbers(result, x) for result in (ours, theirs)]
    assert found[0][0].isnan().all()
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine.isnan(), other.isnan())


def test_hooks_of_layers_are_traced() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].register_forward_hook(lambda module, given, result: result * 2)
    model[1].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    ours, theirs = both(model)
    agree(ours, theirs, torch.randn(3, 8))


def test_transforms_of_functions_are_simulated() -> None:
    ours, theirs = both(nn.Sequential(nn.Linear(8, 4)))
    x = torch.randn(3, 8)

    def loss(result: nn.Module, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        found: dict[str, Tensor] = grad(lambda p: functional_call(result, p, (x,)).square().mean())(parameters)
        return found

    mine, other = (loss(result, dict(result.named_parameters())) for result in (ours, theirs))
    assert all(torch.equal(mine[name], other[name]) for name in other)
    assert counts(ours)[:, ProductOutcome.INTEGER].sum() == 0


@pytest.mark.parametrize("name", ["linear", "bmm", "conv2d", "conv1d of one sequence"])
def test_gradients_of_gradients(name: str) -> None:
    model, x = PRODUCTS[name]
    ours, theirs = both(nn.Sequential(model, nn.Tanh()))
    found = []
    for result in (ours, theirs):
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(result(leaf).square().sum(), leaf, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), [leaf, *result.parameters()])])
    assert difference(*found) < 10 * ROUNDING
    assert counts(ours)[1, ProductOutcome.DIFFERENTIATED] == 1


def test_the_width_may_change_between_forward_and_backward() -> None:
    ours, theirs = both(nn.Sequential(nn.Linear(8, 4)))
    x, found = torch.randn(3, 8), []
    for result in (ours, theirs):
        torch.manual_seed(0)
        y = result(x)
        set_widths(result, 8, 3)
        found.append([y, *torch.autograd.grad(y.sum(), list(result.parameters()))])
        set_widths(result, 4, 8)
    assert difference(*found) < ROUNDING


def test_levels_are_counted_in_codes() -> None:
    ours, _ = both(Encoder())
    proof = cpt_fx.inspect(ours).verify(torch.randint(0, 11, (3, 6)))
    assert proof.proven and proof.widths == (2,) and not proof.idle


def test_a_gradient_that_nobody_sends_is_not_missed() -> None:
    ours, _ = both(Apply(lambda self, x: (self.a(x), self.b(x)), a=nn.Linear(8, 4), b=nn.Linear(8, 4)))
    ours(torch.randn(64, 8))[0].sum().backward()
    waited = {view.layer: (view.waited, view.times_run) for view in cpt_fx.inspect(ours).quantizers
              if view.role == "gradient"}  # fmt: skip
    assert waited == {"a": (2, 1), "b": (2, 0)}
    proof = cpt_fx.inspect(ours).verify()
    assert len(proof.idle) == 1
    assert [view.integer for view in cpt_fx.inspect(ours).products] == [(1, 0, 1), (1, 0, 0)]


ROWS = Format(scheme=Scheme.SYMMETRIC, group=Group.VECTOR)
COLUMNS = Format(scheme=Scheme.SYMMETRIC, group=Group.CHANNEL)
WHOLE = Format(scheme=Scheme.SYMMETRIC)
NOISY = Format(scheme=Scheme.SYMMETRIC, rounding=Rounding.STOCHASTIC)


@pytest.mark.parametrize(
    ("rule", "integer"),
    [
        (Rule(input=ROWS, weight=COLUMNS, gradient=WHOLE), (1, 0, 0)),
        (Rule(input=WHOLE, weight=COLUMNS, gradient=WHOLE), (1, 0, 1)),
        (Rule(input=WHOLE, weight=WHOLE, gradient=ROWS), (1, 1, 0)),
        (Rule(input=NOISY, weight=NOISY, gradient=NOISY), (1, 1, 1)),
    ],
    ids=["rows and channels", "channels", "rows of gradients", "noise forward"],
)
def test_finer_groups_run_where_their_scales_factor(rule: Rule, integer: tuple[int, int, int]) -> None:
    recipe = Recipe(name="mine", linear=rule)
    ours, theirs = both(nn.Sequential(nn.Linear(16, 8)), recipe=recipe)
    agree(ours, theirs, torch.randn(4, 16))
    assert tuple(counts(ours)[:, ProductOutcome.INTEGER].tolist()) == integer
    assert counts(ours)[:, ProductOutcome.GROUPS].sum() == 3 - sum(integer)


def test_without_a_gradient_format_backward_is_floating_point() -> None:
    ours, theirs = both(nn.Sequential(nn.Linear(16, 8)), recipe=only("linear", input=WHOLE, weight=WHOLE))
    agree(ours, theirs, torch.randn(4, 16))
    assert counts(ours)[:, 0].tolist() == [1, 0, 0]
    (view,) = cpt_fx.inspect(ours).products
    assert "its gradient is not quantized" in view.reasons[0]


def test_the_recipe_of_integer_execution() -> None:
    plain = nn.Sequential(nn.Linear(4, 4))
    formats = [
        {str(view.format) for view in cpt_fx.inspect(result).quantizers}
        for result in (
            cpt_fx.transform(plain, Static(8), execution="integer"),
            cpt_fx.transform(plain, Static(8), recipe=recipes.integer()),
        )
    ]
    assert formats[0] == formats[1] == {"symmetric/tensor", "symmetric/tensor/stochastic"}


def test_eager_keeps_codes_for_backward() -> None:
    """Bytes kept by an MLP of BERT's width, between the layers and in them: a quarter, and the scales."""
    model = nn.Sequential(nn.Linear(768, 3072), nn.Linear(3072, 768))
    x = torch.randn(64, 768, requires_grad=True)
    ours, _ = both(model, CODES)
    assert kept(ours, x) <= 0.26 * kept(model, x)
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters() if parameter.ndim > 1)
    assert kept(ours, x) <= 0.26 * (kept(model, x) - parameters), "codes of weights are made again, not kept"
    set_widths(ours, 16, 16)
    assert kept(ours, x) > 0.9 * (kept(model, x) - parameters)


def test_a_weight_changed_between_the_passes_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    ours, _ = both(model, CODES)
    result = ours(torch.randn(3, 16)).sum()
    with torch.no_grad():
        model[1].weight.add_(1)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"inplace operation: a tensor of shape \(4, 8\)"):
        result.backward()


def kept(model: nn.Module, x: Tensor) -> int:
    """Return how many bytes are saved for the backward pass."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(x)
    result.sum().backward()
    return sum(seen.values())
