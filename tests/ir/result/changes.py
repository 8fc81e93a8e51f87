"""What users do to a model that they have: one table of changes, for results and for plain models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.ir.result.models import Block

CHANGES: dict[str, Callable[[Any], Any]] = {}


def change(action: Callable[[Any], Any]) -> Callable[[Any], Any]:
    CHANGES[action.__name__.strip("_")] = action
    return action


class Low(nn.Module):
    """LoRA as people write it: a wrapper around the layer that was there."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.linspace(-1, 1, 2 * base.in_features).view(2, -1))
        self.up = nn.Parameter(torch.linspace(1, -1, 2 * base.out_features).view(-1, 2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return y


class Scaled(nn.Linear):
    """A Linear of a user's own, with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(torch.tanh(x), self.weight, self.bias)


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


@change
def temperature(m: Any) -> None:
    m.temperature = 4.0


@change
def list_changed_in_place(m: Any) -> None:
    m.scales[1] = -3.0


@change
def dict_changed_in_place(m: Any) -> None:
    m.options["gain"] = 3.0


@change
def a_branch_by_a_plain_value(m: Any) -> None:
    m.options["residual"] = False


@change
def a_value_of_an_inner_module(m: Any) -> None:
    m.act.negative_slope = 0.9


@change
def a_value_of_a_layer_deeper(m: Any) -> None:
    m.blocks[1].norm.eps = 0.5


@change
def adapter_set_later(m: Any) -> None:
    m.adapter = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8))


@change
def identity_head(m: Any) -> None:
    m.fc = nn.Identity()


@change
def sequential_head(m: Any) -> None:
    m.fc = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 7))


@change
def head_of_another_size_without_bias(m: Any) -> None:
    m.fc = nn.Linear(8, 7, bias=False)


@change
def head_of_the_same_size(m: Any) -> None:
    m.fc = nn.Linear(8, 4)


@change
def subclass_of_linear(m: Any) -> None:
    m.fc = Scaled(8, 5)


@change
def head_by_setattr_of_parent(m: Any) -> None:
    setattr(m.get_submodule("blocks.1"), "two", nn.Linear(8, 8))  # noqa: B010


@change
def child_by_the_dict_of_modules(m: Any) -> None:
    m._modules["fc"] = nn.Linear(8, 6)


@change
def activation_replaced(m: Any) -> None:
    m.act = nn.Tanh()


@change
def lora_in_every_linear(m: Any) -> None:
    for module in list(m.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(module, Low):
                setattr(module, name, Low(child))


@change
def block_appended(m: Any) -> None:
    m.blocks.append(Block(8))


@change
def block_inserted(m: Any) -> None:
    m.blocks.insert(0, nn.Linear(8, 8))


@change
def block_popped(m: Any) -> None:
    del m.blocks[0]


@change
def blocks_extended_by_assignment(m: Any) -> None:
    m.blocks = nn.ModuleList([*m.blocks, nn.Sequential(nn.Linear(8, 8), nn.GELU())])


@change
def head_added_to_a_dict(m: Any) -> None:
    m.heads["b"] = nn.Linear(8, 2)


@change
def head_taken_from_a_dict(m: Any) -> None:
    m.heads.pop("a")


@change
def pruned(m: Any) -> None:
    for module in m.modules():
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, "weight", amount=0.5)


@change
def pruned_for_good(m: Any) -> None:
    prune.l1_unstructured(m.fc, "weight", amount=0.5)
    prune.remove(m.fc, "weight")


@change
def parametrized(m: Any) -> None:
    parametrize.register_parametrization(m.fc, "weight", Doubled())


@change
def weight_normalised(m: Any) -> None:
    parametrizations.weight_norm(m.stem)
    with torch.no_grad():
        m.stem.parametrizations.weight.original0.mul_(2)


@change
def tied(m: Any) -> None:
    m.blocks[1].one.weight = m.blocks[0].one.weight


@change
def layer_shared(m: Any) -> None:
    m.blocks[1].one = m.blocks[0].two


@change
def parameter_replaced(m: Any) -> None:
    m.fc.weight = nn.Parameter(m.fc.weight.detach() * -3)


@change
def bias_dropped(m: Any) -> None:
    m.fc.bias = None


@change
def data_assigned(m: Any) -> None:
    m.fc.weight.data = m.fc.weight.detach() * -3


@change
def frozen(m: Any) -> None:
    m.blocks.requires_grad_(False)


@change
def layers_forward_patched(m: Any) -> None:
    plain = m.stem.forward
    m.stem.forward = lambda x: torch.tanh(plain(x))


@change
def own_forward_patched(m: Any) -> None:
    plain = m.forward
    m.forward = lambda x: plain(3 * x)


@change
def reinitialised_by_apply(m: Any) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)
            module.weight.data[0] = -0.5

    m.apply(init)


@change
def forward_hook(m: Any) -> None:
    m.blocks[0].one.register_forward_hook(lambda module, args, output: output * 3 + 1)


@change
def forward_pre_hook(m: Any) -> None:
    m.fc.register_forward_pre_hook(lambda module, args: (args[0] * 3 - 1,))


@change
def hook_of_a_container_free_part(m: Any) -> None:
    m.blocks[1].mix.register_forward_hook(lambda module, args, output: output + args[0])


@change
def hook_of_the_root(m: Any) -> None:
    m.register_forward_hook(lambda module, args, output: tuple(tensor * 3 for tensor in output))


def changed(action: Callable[[Any], Any], model: Any) -> Any:
    torch.manual_seed(11)
    action(model)
    return model
