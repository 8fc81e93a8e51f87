"""Every model of `ANY_MODEL`, captured as `transform` does by default: nothing is lost, and it really quantizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import cpt_fx
from cpt_fx.schedules import Static
from tests.capture.faithful import stages, step
from tests.training import check_same, check_same_output, same, tensors_in
from tests.zoo import ANY_MODEL, Entry
from tests.zoo.any_model import missing

pytestmark = [
    # What the models' own libraries and torch itself warn about, on plain models too.
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),  # numpy code that Dynamo runs as torch code
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo, in broken graphs
]
FIRST = {entry.family: name for name, entry in reversed(ANY_MODEL.items())}
"""Of what other packages bring, the slow tests have one model of each family, the default run every fourth."""


def marks(index: int, name: str, entry: Entry) -> list[pytest.MarkDecorator]:
    if entry.needs and FIRST[entry.family] != name:
        return [pytest.mark.long]
    return [pytest.mark.slow] if index % 4 else []


MODELS = pytest.mark.parametrize(
    "entry",
    [
        pytest.param(
            entry,
            # The family is part of the name: `pytest -k "state_space or nasty"`.
            id=f"{entry.family.replace(' ', '_')}-{name}",
            marks=marks(index, name, entry),
        )
        for index, (name, entry) in enumerate(ANY_MODEL.items())
    ],
)


@pytest.fixture(autouse=True)
def _leave_nothing_behind() -> Iterator[None]:
    """Compiled graphs are cached by code object, which all models of a class share."""
    yield
    torch._dynamo.reset()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def skip_if_missing(entry: Entry) -> None:
    reason = missing(entry.needs)
    if reason is not None:
        pytest.skip(reason)


def test_there_are_enough_models() -> None:
    families = [entry.family for entry in ANY_MODEL.values()]
    assert len(families) >= 100
    assert sum(family.startswith("torch.nn") for family in families) >= 20
    assert sum(family.startswith("transformers") for family in families) >= 40
    assert sum(family == "PyTorch Geometric" for family in families) >= 12
    assert sum(family == "timm" for family in families) >= 10
    assert sum(family.startswith("nasty") for family in families) >= 50


@MODELS
def test_builders_repeat_themselves(entry: Entry) -> None:
    """The same model twice gives the same step to the last bit; another batch size has the same weights."""
    skip_if_missing(entry)
    (model, args, kwargs), (again, more, others), (large, _, _) = entry.build(), entry.build(), entry.build(3)
    weights = [list(tensors_in(dict(each.state_dict()))) for each in (model, again, large)]
    assert all(same(*pair) for other in weights[1:] for pair in zip(weights[0], other, strict=True))
    check_same(step(model, args, kwargs), step(again, more, others))


@MODELS
def test_any_model(entry: Entry) -> None:
    skip_if_missing(entry)
    for _ in stages(entry):
        pass


BY_EITHER = ["checkpoint_with_dropout", "tied_language_model", "called_twice", "adapters", "views_in_place", "bilinear"]


@pytest.mark.parametrize("name", BY_EITHER)
def test_dynamo_where_torch_fx_would_do(name: str) -> None:
    """`auto` leaves these to torch.fx; who asks for Dynamo gets the same."""
    for _ in stages(ANY_MODEL[name], "dynamo"):
        pass


@pytest.mark.parametrize("name", ["broken_blocks", "logs"])
def test_a_graph_break_changes_no_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that break in the middle share compiled code, and must not share ranges: compare with no break at all."""
    (broken, args, kwargs), (whole, _, _) = ANY_MODEL[name].build(), ANY_MODEL[name].build()
    results = [
        cpt_fx.transform(broken, Static(4), capture="dynamo"),
        cpt_fx.transform(whole, Static(4), capture="symbolic"),
    ]
    for seed in range(3):
        (ours, theirs) = (step(result, args, kwargs, seed).output for result in results)
        check_same_output(ours, theirs)
    assert len(cpt_fx.inspect(results[0]).quantizers) == len(cpt_fx.inspect(results[1]).quantizers)
