"""What multiplies without a layer: functions, methods and operators of ATen, of activations and of parameters."""

from __future__ import annotations

from tests.fuzz.scope import Production, Scope


def by_weight(s: Scope) -> str:
    """A product with a parameter, in one of the many ways to write it."""
    width = s.size()
    w = s.parameter(s.last, width)
    ways = [
        f"h @ {w}",
        f"torch.matmul(h, {w})",
        f"h.matmul({w})",
        f"torch.ops.aten.matmul.default(h, {w})",
        f"torch.linalg.matmul(h, {w})",
        f"F.linear(h, {w}.t())",
        f"torch.ops.aten.linear.default(h, {w}.t())",
        f"torch.tensordot(h, {w}, dims=1)",
        f"torch.inner(h, {w}.t())",
        f"h.inner({w}.mT)",
        f"torch.matmul(input=h, other={w})",
        f"h.__matmul__({w})",
        f"torch.ops.aten.tensordot(h, {w}, [-1], [0])",
        f"F.linear(input=h, weight={w}.t(), bias=None)",
        f"torch.ops.aten.linear(h, {w}.t())",
    ]
    if s.h.ndim == 2:
        ways += [
            f"torch.mm(h, {w})",
            f"h.mm({w})",
            f"torch.ops.aten.mm.default(h, {w})",
            f"torch.mm(mat2={w}, input=h)",
            f"({w}.t() @ h.t()).t()",
            f"torch.chain_matmul(h, {w})",
            f"torch.linalg.multi_dot([h, {w}])",
            f"torch.spmm(h, {w})",
            f"torch.ops.aten.mm(h, {w})",
        ]
    elif s.h.ndim > 2:
        ways += [f"torch.mm(h.flatten(0, -2), {w}).unflatten(0, h.shape[:-1])"]
    return f"h = {s.one(ways)}"


def with_bias(s: Scope) -> str:
    s.need(s.h.ndim in (2, 3))
    width = s.size()
    more = s.one(("", "", ", alpha=0.5", ", beta=0.5", ", beta=2, alpha=0.5"))
    if s.h.ndim == 2:
        w, b = s.parameter(s.last, width), s.parameter(width)
        ways = [
            f"torch.addmm({b}, h, {w}{more})",
            f"{b}.addmm(h, {w}{more})",
            f"F.linear(h, {w}.t(), {b})",
            f"torch.ops.aten.addmm.default({b}, h, {w}{more})",
            f"torch.ops.aten.addmm({b}, h, {w}{more})",
            f"torch.addmm(input={b}, mat1=h, mat2={w}{more})",
        ]
        return f"h = {s.one(ways)}"
    w, b = s.parameter(s.shape[0], s.last, width), s.parameter(s.shape[1], width)
    ways = [
        f"torch.baddbmm({b}, h, {w}{more})",
        f"{b}.baddbmm(h, {w}{more})",
        f"torch.bmm(h, {w})",
        f"h.bmm({w})",
        f"torch.ops.aten.baddbmm.default({b}, h, {w}{more})",
        f"torch.ops.aten.bmm.default(h, {w})",
        f"torch.addbmm({b}, h, {w}{more})",
        f"{b}.addbmm(h, {w}{more})",
    ]
    return f"h = {s.one(ways)}"


def with_itself(s: Scope) -> str:
    """A product of two activations."""
    s.need(s.h.ndim >= 2)
    ways = [
        "h @ h.mT",
        "h.mT @ h",
        "torch.matmul(h, h.transpose(-1, -2).cos())",
        "torch.matmul(h.mT, h)",
        "torch.tensordot(h, h, dims=([-1], [-1]))",
        "torch.einsum('...ij,...kj->...ik', h, h)",
        "torch.linalg.vecdot(h, h.sin()).unsqueeze(-1) * h",
        "torch.inner(h, h.flatten(0, -2))",
    ]
    if s.h.ndim == 3:
        ways += [
            "torch.bmm(h, h.transpose(1, 2))",
            "h.bmm(h.mT)",
            "torch.bmm(h, h.mT).bmm(h)",
            "torch.ops.aten.bmm(h, h.mT.contiguous())",
        ]
    if s.h.ndim == 2:
        ways += [
            "torch.mm(h, h.t())",
            "h.t().mm(h)",
            "torch.linalg.multi_dot([h, h.t(), h])",
            "torch.cov(h)",
            "torch.kron(h[:2, :3], h[:3, :2])",
        ]
    return f"h = {s.one(ways)} * 0.3"


def of_vectors(s: Scope) -> str:
    s.need(1 <= s.h.ndim <= 2 and s.h.numel() > 0)
    if s.h.ndim == 1:
        w, v = s.parameter(s.size(), s.last), s.parameter(s.last)
        ways = [
            f"torch.mv({w}, h)",
            f"{w}.mv(h)",
            f"{w} @ h",
            f"torch.outer(h, {v})",
            f"h.outer({v})",
            f"h * torch.dot(h, {v})",
            f"h * h.dot({v})",
            f"torch.vdot(h, {v}) * h",
            f"torch.ger(h, {v})",
            f"torch.addmv(h[0], {w}, h)",
            f"torch.addr({s.parameter(s.last, s.last)}, h, {v})",
        ]
    else:
        v = s.parameter(s.last)
        ways = [
            f"h @ {v}",
            f"torch.mv(h, {v})",
            f"h.mv({v})",
            f"torch.addmv(h[:, 0], h, {v})",
            f"torch.inner(h, {v})",
            f"torch.ops.aten.mv.default(h, {v})",
            "torch.outer(h[0], h[-1])",
            "h * torch.dot(h[0], h[-1])",
        ]
    return f"h = {s.one(ways)}"


def einsum(s: Scope) -> str:
    """An equation drawn at random: letters kept, summed over, and new ones, in any order."""
    s.need(1 <= s.h.ndim <= 4 and s.h.numel() > 0)
    mine = "abcd"[: s.h.ndim]
    sizes = dict(zip(mine, s.shape, strict=True))
    theirs = [letter for letter in mine if s.often(0.5)] or [mine[-1]]
    if s.often(0.7):
        theirs.append("k")
        sizes["k"] = s.size()
    s.chance.shuffle(theirs)
    kept = [letter for letter in sorted({*mine, *theirs}) if letter == "k" or letter not in theirs or s.often(0.4)]
    s.chance.shuffle(kept)
    w = s.parameter(*(sizes[letter] for letter in theirs))
    letters = "".join(theirs)
    order = (f"{mine},{letters}", f"h, {w}") if s.often(0.7) else (f"{letters},{mine}", f"{w}, h")
    if s.often(0.15):
        v = s.parameter(sizes[mine[-1]])
        order = (f"{order[0]},{mine[-1]}", f"{order[1]}, {v}")
    arrow = f"->{''.join(kept)}" if s.often(0.9) else ""
    space = s.one(("", " "))
    return f'h = torch.einsum("{order[0].replace(",", "," + space)}{arrow}", {order[1]}) * 0.5'


def functional_convolution(s: Scope) -> str:
    dims = s.h.ndim - 2
    s.need(1 <= dims <= 3 and min(s.shape) > 0)
    filters, channels = s.size(), s.shape[1]
    size = s.one((1, 2, 3))
    w, b = s.parameter(filters, channels, *[size] * dims), s.parameter(filters)
    t = s.parameter(channels, filters, *[size] * dims)
    aten = f"torch.ops.aten.conv{dims}d.default"
    zeros, ones = [0] * dims, [1] * dims
    ways = [
        f"F.conv{dims}d(h, {w}, {b})",
        f"F.conv{dims}d(h, {w}, padding=1)",
        f"F.conv{dims}d(h, weight={w}, bias={b})",
        f"F.conv_transpose{dims}d(h, {t}, {b})",
        f"torch.conv{dims}d(h, {w}, None, 1, {size - 1})",
        f"{aten}(h, {w})",
        f"torch.convolution(h, {w}, {b}, {ones}, {zeros}, {ones}, False, {zeros}, 1)",
        f"torch.ops.aten.convolution.default(h, {w}, {b}, {ones}, {zeros}, {ones}, False, {zeros}, 1)",
        f"F.conv_transpose{dims}d(input=h, weight={t}, stride=2)",
    ]
    if dims == 1:
        ways.append(f"torch.conv_tbc(h.permute(2, 0, 1), {w}.permute(2, 1, 0), {b})")
    return f"h = {s.one(ways)}"


def scaled_dot_product(s: Scope) -> str:
    s.need(s.h.ndim in (2, 3, 4) and min(s.shape) > 0)
    more = s.one(("", "", ", is_causal=True", ", scale=0.3", ", dropout_p=0.2 if self.training else 0.0"))
    if s.often(0.2):
        length = s.shape[-2]
        more = f", attn_mask={s.make('mask', f'nn.Buffer(torch.randn({length}, {length}{s.dtype}))')}"
    values = s.one(("h, h, h", "h, h.cos(), h.sin()", f"h @ {s.parameter(s.last, s.last)}, h, h + 1"))
    return f"h = F.scaled_dot_product_attention({values}{more})"


def rare(s: Scope) -> str:
    s.need(s.h.ndim == 2 and min(s.shape) > 1)
    width = s.last
    square = s.parameter(width, width)
    ways = [
        f"h @ torch.matrix_power({square}, 2)",
        f"h @ torch.linalg.matrix_power({square}, 3) * 0.1",
        f"h @ torch.matrix_exp({square})",
        f"torch._addmm_activation({s.parameter(width)}, h, {square})",
        "torch.corrcoef(h)",
        f"{square}.__rmatmul__(h)",
        f"torch.linalg.vecdot(h, h) @ {s.parameter(s.shape[0], 5)}",
        f"torch.cdist(h, {square})",
        "torch.linalg.norm(h, ord=2) * h",
        f"torch.chain_matmul(h, {square}, {square})",
        f"F.bilinear(h, h, {s.parameter(5, width, width)})",
        "torch.mm(h, h.t()).matrix_power(2) * 0.1",
        f"torch.trapezoid(h @ {square}, dim=0)",
        f"torch.kron({square}[:2, :2], h)",
    ]
    return f"h = {s.one(ways)}"


PRODUCTS: dict[Production, float] = {
    by_weight: 8,
    with_bias: 5,
    with_itself: 4,
    of_vectors: 3,
    einsum: 5,
    functional_convolution: 4,
    scaled_dot_product: 3,
    rare: 1,
}
