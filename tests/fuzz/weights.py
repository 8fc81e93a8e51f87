"""Weights that are more than a parameter of a layer: shared, tied, parametrized, computed; buffers that change."""

from __future__ import annotations

from tests.fuzz.scope import Production, Scope

PARAMETRIZATIONS = (
    "class Scaled(nn.Module):\n    def forward(self, weight):\n        return weight * 0.5\n",
    "class LowRank(nn.Module):\n    def __init__(self, rows, columns):\n        super().__init__()\n"
    "        self.a = nn.Parameter(torch.randn(rows, 2) * 0.5)\n"
    "        self.b = nn.Parameter(torch.randn(2, columns) * 0.5)\n\n"
    "    def forward(self, weight):\n        return weight + self.a @ self.b\n",
    "class Masked(nn.Module):\n    def __init__(self, *shape):\n        super().__init__()\n"
    "        self.register_buffer('mask', (torch.arange(shape[0]).view(-1, 1) % 3 > 0).float())\n\n"
    "    def forward(self, weight):\n        return weight * self.mask\n",
)


def parametrized(s: Scope) -> str:
    width = s.last if s.often(0.3) else s.size()
    layer, which = f"nn.Linear({s.last}, {width})", s.chance.randrange(7)
    if which == 0:
        made = f"parametrizations.weight_norm({layer})"
    elif which == 1:
        made = f"parametrizations.spectral_norm({layer})"
    elif which == 2:
        made = f"parametrizations.orthogonal({layer})"
    elif which == 3:
        made = f"nn.utils.spectral_norm({layer})"
    else:
        s.shared.define(PARAMETRIZATIONS[which - 4])
        kind = ("Scaled()", f"LowRank({width}, {s.last})", f"Masked({width}, {s.last})")[which - 4]
        made = layer
    call = s.layer("made", made)
    if which >= 4:
        s.start(f'parametrize.register_parametrization({call}, "weight", {kind})')
    if s.often(0.2):
        return f"h = h @ {call}.weight.t()"
    return f"h = {call}(h)"


def computed(s: Scope) -> str:
    """A weight that is computed in `forward`."""
    width, rows = s.size(), s.last
    w = s.parameter(width, rows)
    v = s.parameter(width, rows)
    ways = [
        f"{w} * {v}",
        f"{w} * ({w} > 0)",
        f"torch.cat([{w}, {v}])",
        f"{w}.t().contiguous().t()",
        f"{w} / {w}.norm()",
        f"{w}.softmax(-1)",
        f"{w}.tanh()",
        f"torch.where({w} > 0, {w}, {v})",
        f"{w} + {v}",
        f"{w}[: {max(width // 2, 1)}]",
        f"torch.stack([{w}, {v}])[1]",
        f"{w} - {w}.mean(0)",
        f"{w}.detach()",
        f"{w}.clone().mul_(0.5)",
        f"{w}.clone().addmm_({s.parameter(width, 4)}, {s.parameter(4, rows)})",
        f"({w} * 1.0).add_({v}[0])",
        f"{w}.flip(0)",
        f"({w}.flatten() * 0.5).view({width}, {rows})",
        f"torch.stack([{w}, {v}]).mean(0)",
        f"{w}.expand_as({v})",
        f"{w} @ {s.parameter(rows, rows)}",
        f"{w}.round() + ({w} - {w}.detach())",
        f"{w}.reshape({width}, {rows})",
        f"{s.parameter(2, width, rows)}[0]",
        f"{w}.masked_fill({v} > 1, 0.0)",
        f"F.normalize({w}, dim=1)",
    ]
    made = s.one(ways)
    if s.often(0.3):
        return f"weight = {made}\nh = h @ weight.t()"
    return f"h = F.linear(h, {made})"


def vector_weight(s: Scope) -> str:
    w = s.parameter(2, s.last)
    return (
        s.one((f"h = h @ {w}[0]", f"h = torch.matmul(h, {w}.sum(0))", f"h = F.linear(h, {w}[1])"))
        + ".unsqueeze(-1) + h"
    )


def called_again(s: Scope) -> str:
    """Call a layer that was called before."""
    layers = [layer for layer in s.calls if s.value(layer) is not None]
    s.need(layers)
    return f"h = {s.one(layers)}(h)"


def tied(s: Scope) -> str:
    """Two layers of one weight, or a layer's weight read by the code."""
    other = s.layer("linear", f"nn.Linear({s.last}, {s.last})")
    if s.often(0.5):
        layer = s.layer("linear", f"nn.Linear({s.last}, {s.last})")
        s.start(f"{layer}.weight = {other}.weight")
        return f"h = {layer}(torch.tanh({other}(h)))"
    weight = s.one((f"{other}.weight", f"{other}.weight.t()"))
    return s.one(
        (f"h = F.linear({other}(h), {weight})", f"h = {other}(h) @ {weight}", f"h = {other}(h) + h @ {weight}")
    )


def tied_embedding(s: Scope) -> str:
    s.need(s.h.dtype.itemsize >= 4)  # in half precision rounding alone would choose other rows
    table = s.layer("embedding", f"nn.Embedding(7, {s.last})")
    return f"h = h + {table}((h.detach().abs() * 3).long() % 7).mean(-2)\nh = F.linear(h, {table}.weight)"


def buffered(s: Scope) -> str:
    """A buffer that `forward` reads, and writes in one of several ways."""
    size = s.last
    buffer = s.make("kept_state", f"nn.Buffer(torch.zeros({size}{s.dtype}){s.one(('', ', persistent=False'))})")
    rows = "h.detach().reshape(-1, h.shape[-1]).mean(0)"
    ways = [
        f"{buffer} += 1",
        f"{buffer}.mul_(0.9).add_({rows}, alpha=0.1)",
        f"{buffer} = 0.9 * {buffer} + 0.1 * {rows}",
        f"{buffer}.copy_({rows})",
        f"with torch.no_grad():\n    {buffer}.lerp_({rows}, 0.5)",
        f"{buffer}[0] = 1.0",
        f"if self.training:\n    {buffer}.add_({rows})",
    ]
    return f"{s.one(ways)}\nh = h - 0.1 * {buffer}{s.one(('', '.clone()', '.detach()'))}"


def constant(s: Scope) -> str:
    """A product with a buffer, or with a plain tensor made on the way."""
    width = s.size()
    name = s.make("fixed", f"nn.Buffer(torch.randn({s.last}, {width}{s.dtype}))")
    return s.one((f"h = h @ {name}", f"h = F.linear(h, {name}.t())", f"h = h @ torch.eye({s.last}{s.dtype})"))


def listed(s: Scope) -> str:
    name = s.make(
        "list",
        "nn.ParameterList(["
        + ", ".join(f"nn.Parameter(torch.randn({s.last}, {s.last}{s.dtype}) * 0.5)" for _ in range(2))
        + "])",
    )
    return s.one((f"for w in {name}:\n    h = torch.tanh(h @ w)", f"h = h @ {name}[0] + h @ {name}[1]"))


WEIGHTS: dict[Production, float] = {
    parametrized: 2,
    computed: 4,
    vector_weight: 0.7,
    called_again: 3,
    tied: 1.5,
    tied_embedding: 0.6,
    buffered: 2,
    constant: 1.5,
    listed: 1.2,
}
