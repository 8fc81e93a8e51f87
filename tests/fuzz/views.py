"""Shapes, element-by-element operators, dtypes and writes in place."""

from __future__ import annotations

from tests.fuzz.scope import Production, Scope


def reshaped(s: Scope) -> str:
    s.need(s.h.ndim >= 2)
    ways = [
        "h.transpose(-1, -2)",
        "h.transpose(0, 1)",
        "h.mT",
        "h.flatten(-2)",
        "h.flatten(0, 1)",
        "h.unsqueeze(1)",
        "h.reshape(h.shape[0], -1)",
        "h.unsqueeze(0)",
        "h.permute(*range(h.ndim - 1, -1, -1))",
        "torch.movedim(h, 0, -1)",
        "h.reshape(-1, h.shape[-1])",
        "h.swapaxes(0, -1).contiguous()",
        "h.view(h.size(0), -1) if h.is_contiguous() else h.reshape(h.size(0), -1)",
        "h.squeeze()",
        "torch.ops.aten.transpose.int(h, 0, 1)",
        "h[None]",
        "h.contiguous().view(-1, h.size(-1))",
    ]
    if s.last % 2 == 0:
        ways += ["h.unflatten(-1, (2, -1))", "h.reshape(*h.shape[:-1], 2, h.shape[-1] // 2).transpose(-2, -3)"]
    return f"h = {s.one(ways)}"


def sliced(s: Scope) -> str:
    s.need(s.h.ndim >= 2 and min(s.shape) > 1)
    ways = [
        "h[:, 1:]",
        "h[..., ::2]",
        "h[:-1]",
        "h.narrow(-1, 0, 2)",
        "h[:, 0]",
        "h.select(1, -1)",
        "h.diagonal(0, 0, 1)",
        "torch.cat([h, h.flip(0)], dim=-1)",
        "torch.cat(h.chunk(2, dim=-1)[::-1], dim=-1)",
        "torch.stack([h, -h])",
        "torch.stack(h.unbind(0), dim=1)",
        "h.roll(1, -1)",
        "h.repeat_interleave(2, dim=0)",
        "h.flip(-1)",
        "h.unfold(-1, 2, 1)",
        "h.index_select(0, torch.tensor([0, 1, 0]))",
        "h[torch.tensor([1, 0, 1])]",
        "h.split([1, h.shape[-1] - 1], dim=-1)[1]",
        "h[:1].expand(5, *h.shape[1:])",
        "h.as_strided((2, 2), (1, 1))",
        "h.tril()",
        "F.pad(h, (1, 0))",
        "h.repeat(2, *[1] * (h.ndim - 1))",
        "h.new_ones(2, 1).expand(2, h.shape[0]) * h[:, 0].flatten()[0]",
    ]
    return f"h = {s.one(ways)}"


def element_by_element(s: Scope) -> str:
    ways = [
        "torch.tanh(h)",
        "torch.sigmoid(h)",
        "F.relu(h)",
        "F.gelu(h)",
        "h * 0.5",
        "h + 1",
        "h.sin()",
        "-h",
        "h.abs()",
        "F.softmax(h, dim=-1)",
        "h.clamp(-1, 1)",
        "h.masked_fill(h > 1, 0.0)",
        "torch.where(h > 0, h, 0.1 * h)",
        "h - h.mean(-1, keepdim=True)",
        "F.layer_norm(h, h.shape[-1:])",
        "F.normalize(h, dim=-1)",
        "h / (1 + h.square())",
        "h.cumsum(-1) * 0.3",
        "h.sort(-1).values",
        "F.log_softmax(h, -1)",
        "torch.nan_to_num(h)",
        "h * h.sigmoid()",
        "F.leaky_relu(h, 0.1)",
        "h.logsumexp(-1, keepdim=True) + h",
        "h.topk(2, -1)[0]",
        "torch.maximum(h, h.mean())",
        "h.round() + (h - h.detach())",
        "h.amax(-1, keepdim=True) - h",
        "h.mean(0, keepdim=True)",
    ]
    return f"h = {s.one(ways)}"


def with_parameter(s: Scope) -> str:
    w = s.parameter(s.last)
    return s.one((f"h = h + {w}", f"h = h * {w}", f"h = torch.add(h, {w}, alpha=0.5)", f"h = {w} - h", f"h += {w}"))


def skipped(s: Scope) -> str:
    """Keep a value for later, or add one that was kept."""
    kept = [name for name, value in s.values.items() if name.startswith("kept")]
    fitting = [name for name in kept if s.values[name].shape == s.h.shape and s.values[name].dtype == s.h.dtype]
    if not fitting or s.often(0.4):
        return f"{s.shared.name('kept')} = h"
    name = s.one(fitting)
    ways = (f"h + {name}", f"{name} + h", f"torch.cat([h, {name}], dim=-1)", f"h * {name}", f"h.add({name})")
    return f"h = {s.one(ways)}"


def product_with_kept(s: Scope) -> str:
    """Multiply with a value that was kept before, where sizes fit."""
    kept = [name for name, value in s.values.items() if name.startswith("kept") and value.ndim == s.h.ndim >= 2]
    s.need(kept)
    name = s.one(kept)
    return s.one((f"h = h @ {name}.mT", f"h = torch.matmul({name}.mT, h)", f"h = {name} @ h")) + " * 0.3"


def in_place(s: Scope) -> str:
    """Write over a value: by keyword, by position, as a method, as an operator, through a view."""
    ways = [
        "F.relu(h, True)",
        "F.relu(h, inplace=True)",
        "h.relu_()",
        "h += 1",
        "h *= 0.5",
        "h.add_(0.5)",
        "torch.relu_(h)",
        "h.clamp_(-1, 1)",
        "h[:1] = 0",
        "h[..., 0].add_(1)",
        "h.neg_()",
        "F.leaky_relu(h, 0.1, True)",
        "h.mul_(h.detach())",
        "h.view(-1)[:2].zero_()",
        "F.dropout(h, 0.3, self.training, True)",
        "F.hardtanh(h, -1.0, 1.0, True)",
        "h.masked_fill_(h > 1, 0.5)",
        "h -= h.detach().mean()",
        "h /= 2",
        "h.copy_(h.detach().cos())",
        "h[0] *= 2",
        "h.transpose(0, -1)[0].mul_(2)",
        "F.silu(h, True)",
        "F.elu_(h)",
        "torch.ops.aten.add_.Tensor(h, h.detach())",
        "h.flatten()[0] = 1.0",
        "h.fill_diagonal_(0.5)",
        "h.detach().mul_(1)",
    ]
    kept = [name for name in s.values if name.startswith("kept")]
    start = s.one(("h = h + 0.0", "h = h * 1.5", "z = h.clone()\nh = z.view_as(z)", "", f"{s.shared.name('kept')} = h"))
    if kept and s.often(0.2):
        return f"{s.one(kept)}.add_(1)"
    return "\n".join(filter(None, (start, s.one(ways))))


def product_in_place(s: Scope) -> str:
    s.need(s.h.ndim in (1, 2, 3) and min(s.shape) > 0)
    if s.h.ndim == 1:
        w = s.parameter(s.last, 5)
        ways = [f"h.addmv_({w}, {w}[0])", f"h.addmv_({w}, {w}.sum(0))"]
    elif s.h.ndim == 2:
        a, b = s.parameter(s.shape[0], 5), s.parameter(5, s.last)
        ways = [
            f"h.addmm_({a}, {b})",
            f"h.addmm_({a}.cos(), {b}, beta=0.5)",
            f"h.addr_({a}[:, 0], {b}[0])",
            f"h += {a} @ {b}",
            f"h[:1] = {a}[:1] @ {b}",
            f"z = h[1:]\nh.addmm_({a}, {b})\nh = torch.cat([h, z * 2])",
            f"z = h.view(-1)\nh += {b}[0]\nh = h * z.view_as(h)",
            f"h @= {s.parameter(s.last, s.last)}",
            f"torch.ops.aten.addmm_.default(h, {a}, {b})",
            f"h.sub_({a} @ {b})",
        ]
    else:
        a, b = s.parameter(s.shape[0], s.shape[1], 5), s.parameter(s.shape[0], 5, s.last)
        ways = [
            f"h.baddbmm_({a}, {b})",
            f"h.baddbmm_({a}, {b}, alpha=0.5)",
            f"h[0].addmm_({a}[0], {b}[0])",
            f"h += torch.bmm({a}, {b})",
        ]
    return f"h = h * 1.0\n{s.one(ways)}"


def written_out(s: Scope) -> str:
    """A product written into a tensor that is there, which works without gradients only."""
    s.need(s.h.ndim == 2 and s.h.numel())
    width = s.size()
    w = s.parameter(s.last, width)
    return (
        f"room = h.new_empty(h.shape[0], {width})\nwith torch.no_grad():\n    torch.{s.one(('mm', 'matmul'))}(h, {w}, "
        f"out=room)\nh = room + h.sum(-1, keepdim=True) * 0.1"
    )


def other_dtype(s: Scope) -> str:
    ways = [
        "h = h.double()",
        "h = h.float()",
        "h = h.to(torch.bfloat16)",
        "h = h.bfloat16().float()",
        "h = h.half().float()",
    ]
    return s.one(ways)


VIEWS: dict[Production, float] = {
    reshaped: 7,
    sliced: 5,
    element_by_element: 9,
    with_parameter: 2,
    skipped: 4,
    product_with_kept: 2,
    in_place: 4,
    product_in_place: 2,
    written_out: 0.7,
    other_dtype: 0.5,
}
