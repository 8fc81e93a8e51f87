"""`verify()` proves that quantization ran, says what it could not prove, and leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from cpt_fx.capture.dry_run import dry_run, eager_model, tensors_in
from cpt_fx.formats import Format, Scheme
from cpt_fx.inspection import Verification, VerificationError
from cpt_fx.inspection.census import census
from cpt_fx.quantizers import kernels as simulate
from cpt_fx.recipes import default
from cpt_fx.schedules import Static
from tests.inspection.models import Net, cyclic, images, train_step, trained, transformed
from tests.training import counters, show_widths, widths
from tests.zoo import ZOO, Build


def record(model: nn.Module, name: str) -> Tensor:
    return counters(model)[name]


def test_a_trained_model_is_proven() -> None:
    model = trained()
    proof = cpt_fx.inspect(model).verify()
    assert proof.proven
    assert (proof.quantizers, proof.runs, proof.widths) == (22, 22, (3, 8))
    assert 0.1 < proof.largest_ratio <= 1.0
    assert str(proof).startswith("22 quantizers ran, 22 times in total; levels counted at widths 3, 8: never more")
    assert proof.views == cpt_fx.inspect(model).quantizers


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(1.0, "never more than 2^b levels"), (0.996, "never more than 2^b levels"), (0.29, "at most 29 % of them")],
)
def test_the_share_of_levels_is_said_where_it_is_below_all(ratio: float, said: str) -> None:
    text = str(Verification(quantizers=3, runs=5, widths=(4,), largest_ratio=ratio))
    assert text.endswith(said)
    assert "never more than 2^b levels" in text


def test_a_proof_can_be_shown_instead_of_the_records() -> None:
    model = transformed()
    inspection = cpt_fx.inspect(model)
    proof = inspection.verify(images())
    assert all(view.times_run == 0 for view in inspection.quantizers)
    shown = replace(inspection, shown=proof)
    assert sum(view.times_run for view in shown.quantizers) == proof.runs == 22
    # The trial ran at 2 bits; the model does not.
    assert [view.bits for view in shown.quantizers] == [view.bits for view in inspection.quantizers]
    assert {view.bits for view in shown.quantizers} == {3, 8}
    assert "never" not in str(shown) and "<b>0</b><span>never ran</span>" in shown.html()
    # Asked again, it looks at the model.
    with pytest.raises(VerificationError, match="never ran"):
        shown.verify()


@pytest.mark.parametrize("build", ZOO.values(), ids=ZOO.keys())
def test_the_whole_zoo_is_proven_by_a_trial(build: Build) -> None:
    model, args, kwargs = build()
    result = cpt_fx.transform(model, cyclic(), example_inputs=args, example_kwargs=kwargs)
    proof = cpt_fx.inspect(result).verify(*args, **kwargs)
    assert proof.proven, str(proof)
    assert 2 in proof.widths


# What it has to catch.


def test_a_model_that_never_ran() -> None:
    with pytest.raises(VerificationError, match=r"^23 problems with quantization") as caught:
        cpt_fx.inspect(transformed()).verify()
    message = str(caught.value)
    assert "blocks.1.conv2: bias quantizer blocks_1_conv2_bias_q (conv2d, bias) never ran" in message
    assert "ask for verify(gradients=False)" in message


def test_one_quantizer_that_never_ran() -> None:
    model = trained()
    record(model, "head_weight_q").zero_()
    with pytest.raises(VerificationError, match=r"^1 problem .*:\n  head: weight quantizer .* never ran$"):
        cpt_fx.inspect(model).verify()


@pytest.mark.parametrize("name", ["blocks_0_conv1_weight_q", "blocks_0_conv1_gradient_q"])
def test_a_quantizer_taken_out_of_the_flow(name: str) -> None:
    """It still runs where nothing reads it; the promises of the graph are checked as well."""
    model = trained()
    (module,) = cpt_fx.graphs(model)
    node = next(node for node in module.graph.nodes if node.name == name)
    node.replace_all_uses_with(node.args[0])
    module.recompile()
    with pytest.raises(VerificationError, match=r"blocks\.0\.conv1.* (not quantized|bypasses the gradient quantizer)"):
        cpt_fx.inspect(model).verify(images())


def _copied(x: Tensor, *rest: object) -> simulate.Quantized:
    return simulate.Quantized(x.clone(), torch.empty(3), None, is_new=True)


@pytest.mark.parametrize("recipe", ["default", "paper", "integer", "fp8", "mx"])
def test_quantizers_replaced_by_the_identity(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    model = transformed(recipe=recipe)
    monkeypatch.setattr("cpt_fx.quantizers.straight_through.quantize", lambda x, *rest: x.clone())
    monkeypatch.setattr("cpt_fx.quantizers.kernels.quantize", _copied)
    with pytest.raises(VerificationError) as caught:
        cpt_fx.inspect(model).verify(images())
    unmasked = {line.split(" showed ")[0] for line in str(caught.value).splitlines()[1:]}
    left = [view for view in cpt_fx.inspect(model).quantizers if f"  {view}" not in unmasked]
    # A block of 32 gradients behind a ReLU and a mean may hold four values or fewer anyway.
    assert len(left) <= (recipe == "mx") and all(view.role == "gradient" for view in left)
    assert "distinct levels at 2 bits, 4 are allowed: it does not quantize" in str(caught.value)
    # Training finds it too: three bits are few.
    train_step(model)
    with pytest.raises(VerificationError, match="distinct levels at 3 bits, 8 are allowed"):
        cpt_fx.inspect(model).verify()


def test_too_many_levels_in_the_records() -> None:
    model = trained()
    record(model, "stem_weight_q")[3] = 9
    with pytest.raises(VerificationError, match=r"stem: weight quantizer .* showed 9 distinct levels at 3 bits"):
        cpt_fx.inspect(model).verify()
    record(model, "stem_weight_q")[3] = 8
    cpt_fx.inspect(model).verify()


def test_a_float_at_one_bit_is_what_it_is_at_two() -> None:
    float_weight = default().with_rule("linear", weight=Format(scheme=Scheme.FLOAT, exponent=2))
    model = cpt_fx.transform(nn.Sequential(nn.Linear(40, 40)), Static(1), recipe=float_weight, capture="symbolic")
    with census(model) as seen:
        model(torch.randn(30, 40)).sum().backward()
    assert not seen.problems
    inspection = cpt_fx.inspect(model)
    proof = inspection.verify()
    assert proof.largest_ratio == 1.0
    assert "at 1 bit a float is what it is at 2, with three levels: 0" in str(proof)
    assert "3/4" in str(inspection) and "3 of 4 levels" in inspection.html()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_running_range_that_is_not_finite(bad: float) -> None:
    model = trained()
    x = images()
    x[0, 0, 0, 0] = bad
    model(x)
    assert "from which no running range learned, came to stem (input, 1)" in str(cpt_fx.inspect(model).verify())
    with torch.no_grad():
        model.get_buffer("stem.cpt_fx_input_range_min").fill_(bad)
    with pytest.raises(VerificationError, match=r"stem: the running range of input is .*(nan|inf)"):
        cpt_fx.inspect(model).verify()


def test_a_nan_that_only_the_trial_brings() -> None:
    model = trained()
    x = images()
    x[:] = float("nan")
    with pytest.raises(VerificationError, match="stem: the running range of input is as it was: a NaN or an infinity"):
        cpt_fx.inspect(model).verify(x)
    cpt_fx.inspect(model).verify()


def test_a_width_that_is_not_scheduled() -> None:
    model = trained(overrides={"head": 5})
    cpt_fx.inspect(model).verify()
    show_widths(model, weight=4)
    with pytest.raises(VerificationError) as caught:
        cpt_fx.inspect(model).verify()
    message = str(caught.value)
    assert "stem: weight quantizer" in message and "is at 4 bits; for training at step 0 it should be at 3" in message
    assert "head" not in message


# What it lets pass, and what it says then.


@pytest.mark.filterwarnings("ignore:.* learned anything:UserWarning")
def test_evaluation_only() -> None:
    model = transformed().eval()
    model(images())
    proof = cpt_fx.inspect(model).verify(gradients=False)
    assert proof.proven
    assert len(proof.idle) == 6
    assert "6 gradient quantizers left out: not asked for" in str(proof)
    with pytest.raises(VerificationError, match=r"verify\(gradients=False\)"):
        cpt_fx.inspect(model).verify()
    assert cpt_fx.inspect(model).verify(images(), gradients=False).proven


def test_frozen_layers_have_no_gradient_to_quantize() -> None:
    model = transformed()
    model.get_submodule("stem").requires_grad_(False)
    train_step(model)
    proof = cpt_fx.inspect(model).verify()
    assert proof.idle == ("stem_gradient_q",)
    assert "nothing before them is trained" in str(proof)


def test_wide_widths_are_not_claimed() -> None:
    model = cpt_fx.transform(Net(), Static(16))
    train_step(model)
    assert "widths up to 12 bits, not above" in str(cpt_fx.inspect(model).verify())


def test_full_precision_claims_nothing() -> None:
    model = cpt_fx.transform(Net(), Static(32))
    train_step(model)
    proof = cpt_fx.inspect(model).verify()
    assert proof.widths == ()
    assert "nothing was rounded" in str(proof)


def test_a_compiled_model_is_counted_but_its_levels_are_not() -> None:
    model = cpt_fx.transform(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), cyclic())
    compiled: Any = torch.compile(model, backend="aot_eager")
    compiled(torch.randn(4, 6)).square().sum().backward()
    proof = cpt_fx.inspect(compiled).verify()
    assert not proof.proven
    assert "levels were not counted for" in str(proof)
    assert cpt_fx.inspect(compiled).verify(torch.randn(4, 6)).proven


# Inputs that do not fit.


@pytest.mark.parametrize("wrap", [tuple, list])
def test_arguments_in_a_tuple_are_pointed_out(wrap: Any) -> None:
    with pytest.raises(TypeError) as caught:
        cpt_fx.inspect(transformed()).verify(wrap([images()]))
    assert str(caught.value) == "verify takes the model's arguments themselves: verify(x), not verify((x,))"
    # The error underneath shows the tensor.
    assert caught.value.__suppress_context__


def test_a_model_that_takes_a_tuple_gets_one() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            result: Tensor = self.inner(pair[0] + pair[1])
            return result

    assert cpt_fx.inspect(transformed(Pair())).verify((torch.randn(3, 4), torch.randn(3, 4))).proven


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((torch.zeros(4, 5, 8, 8),), {}, "RuntimeError: Given groups=1, .* but got 5 channels instead"),
        ((torch.zeros(1), torch.zeros(1)), {}, r"TypeError: forward\(\) takes 2 positional arguments but 3 were given"),
        ((), {"x": (torch.zeros(4, 3, 8, 8),)}, "RuntimeError: .* instead found type 'tuple'"),
        ((), {"x": [[0.0]]}, "RuntimeError: .* instead found type 'list'"),
    ],
)
def test_inputs_that_do_not_fit_are_told_in_a_sentence(
    args: Any, kwargs: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=f"^the model does not run on the inputs given to verify: {said}") as caught:
        cpt_fx.inspect(transformed()).verify(*args, **kwargs)
    assert "\n" not in str(caught.value)
    cause = caught.value.__cause__
    assert (cause is None) == ("instead found" in said)
    assert cause is not None or caught.value.__suppress_context__
    assert capsys.readouterr().err == ""


# No traces.


def snapshot(model: nn.Module) -> list[Any]:
    state = [(name, tensor.clone()) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    gradients = [(name, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()]
    ours = [*counters(model).items(), *widths(model).items()]
    ours = [(name, value.clone() if isinstance(value, Tensor) else value) for name, value in ours]
    return [state, ours, gradients, [module.training for module in model.modules()], torch.get_rng_state()]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_trial_leaves_no_trace(training: bool, gradients: bool) -> None:
    schedule = cyclic()
    model = cpt_fx.transform(Net(), schedule)
    for _ in range(3):
        model(images()).square().mean().backward()
        schedule.step(4)
    model.train(training)
    x = images()
    before = snapshot(model)
    cpt_fx.inspect(model).verify(x, gradients=gradients)
    assert same(snapshot(model), before)
    assert schedule.position == 12
    schedule.step()
    assert widths(model)["weight"] == (schedule.bits(13).weight if training else 8)


def test_no_trace_when_the_model_fails() -> None:
    model, wrong = trained(), torch.randn(4, 5, 8, 8)
    before = snapshot(model)
    with pytest.raises(ValueError, match="does not run on the inputs"):
        cpt_fx.inspect(model).verify(wrong)
    assert same(snapshot(model), before)


def test_a_backward_pass_still_to_come_is_not_disturbed() -> None:
    """Batch norm in evaluation keeps its buffers for the backward pass: writing them would make it fail."""
    model = trained().eval()
    x = images()

    def gradient(*, between: bool) -> Tensor:
        torch.manual_seed(1)
        loss = model(x).square().mean()
        if between:
            cpt_fx.inspect(model).verify(images())
        torch.manual_seed(2)
        loss.backward()
        found = model.get_parameter("stem.bias").grad
        model.zero_grad()
        assert found is not None
        return found

    assert torch.equal(gradient(between=True), gradient(between=False))


def test_hooks_that_step_an_optimizer_are_not_called() -> None:
    model = trained()
    called: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    cpt_fx.inspect(model).verify(images())
    assert called == []


def test_parameters_written_by_forward_get_their_values_back() -> None:
    class Renormed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4) * 9)
            self.out = nn.Linear(4, 4)

        def forward(self, index: Tensor) -> Tensor:
            result: Tensor = self.out(F.embedding(index, self.weight, max_norm=1.0))
            return result

    model = Renormed()
    before = model.weight.detach().clone()
    with dry_run(model):
        model(torch.arange(8))
        assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, before)


def test_tensors_are_found_in_any_output() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    assert list(map(len, tensors_in({"a": one, "b": [two, (None, 3)], "c": {"d": three}}))) == [1, 2, 3]


def test_wrappers_of_compilers_are_taken_off() -> None:
    model = Net()
    compiled: Any = torch.compile(model)
    assert eager_model(compiled) is model
    assert eager_model(nn.DataParallel(model)) is model
    assert eager_model(model) is model


def test_a_refusal_of_the_first_call_is_told_as_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 1, 8, batch_first=True))
    with pytest.raises(cpt_fx.CaptureError, match="cannot trace TransformerEncoderLayer"):
        cpt_fx.transform(model, Static(4), capture="symbolic", example_inputs=(torch.randn(2, 3, 4),))
