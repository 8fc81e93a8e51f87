"""Products: einsum as matrix products, and products of vectors, whose gradients ORT gives a wrong shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpt_fx.errors import ExportError
from cpt_fx.export.rewriting import Rewrite, Run, aten

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _matmul(run: Run, x: Tensor, y: Tensor) -> Any:
    if x.ndim > 1 and y.ndim > 1:
        return NotImplemented
    if x.ndim == 1 and y.ndim == 1:
        return (x * y).sum()
    if y.ndim == 1:
        return torch.matmul(x, y.unsqueeze(1)).squeeze(-1)
    return torch.matmul(x.unsqueeze(0), y).squeeze(-2)


def _einsum(run: Run, equation: str, operands: Sequence[Tensor], path: Any = None) -> Tensor:
    """Multiply operands one after the other, each time by one batched matrix product."""
    labels, out = _parsed(equation, operands)
    names, result = labels[0], operands[0]
    for place in range(1, len(operands)):
        needed = set(out).union(*labels[place + 1 :])
        names, result = _product(_once(names, result), _once(labels[place], operands[place]), needed)
    names, result = _once(names, result)
    summed = [dim for dim, name in enumerate(names) if name not in out]
    result = result.sum(summed) if summed else result
    names = [name for name in names if name in out]
    return result.permute([names.index(name) for name in out])


def _parsed(equation: str, operands: Sequence[Tensor]) -> tuple[list[list[str]], list[str]]:
    """Return the labels of the operands and of the result; dims under an ellipsis get labels of their own."""
    given, arrow, out = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    free = [letter for letter in _LETTERS if letter not in equation]
    hidden = max(
        (x.ndim - len(term.replace("...", "")) for term, x in zip(terms, operands, strict=True) if "..." in term),
        default=0,
    )
    many = free[:hidden]

    def spread(term: str, dims: int) -> list[str]:
        before, dots, after = term.partition("...")
        inside = many[len(many) - dims :] if dots else []
        return [*before, *inside, *after]

    labels = [spread(term, x.ndim - len(term.replace("...", ""))) for term, x in zip(terms, operands, strict=True)]
    if arrow:
        return labels, spread(out, hidden)
    seen = "".join(terms).replace(".", "")
    return labels, [*many, *sorted(letter for letter in set(seen) if seen.count(letter) == 1)]


_Labelled = tuple[list[str], Tensor]


def _once(names: Sequence[str], x: Tensor) -> _Labelled:
    """Take the diagonal of dims with one label."""
    names = list(names)
    for name in dict.fromkeys(names):
        while names.count(name) > 1:
            first, second = [dim for dim, other in enumerate(names) if other == name][:2]
            x = torch.diagonal(x, 0, first, second)
            names = [other for dim, other in enumerate(names) if dim not in (first, second)] + [name]
    return names, x


def _product(left: _Labelled, right: _Labelled, needed: set[str]) -> _Labelled:
    (a, x), (b, y) = left, right
    x, a = _summed(x, a, needed.union(b))
    y, b = _summed(y, b, needed.union(a))
    batch = [name for name in a if name in b and name in needed]
    inner = [name for name in a if name in b and name not in needed]
    rows, columns = [name for name in a if name not in b], [name for name in b if name not in a]
    for name in (*batch, *inner):
        if x.shape[a.index(name)] != y.shape[b.index(name)]:
            raise ExportError("einsum with dims of size 1 that are repeated: expand them before")
    x = x.permute([a.index(name) for name in (*batch, *rows, *inner)])
    y = y.permute([b.index(name) for name in (*batch, *inner, *columns)])
    outer = [x.shape[dim] for dim in range(len(batch))]
    tall, wide = x.shape[len(batch) : len(batch) + len(rows)], y.shape[len(batch) + len(inner) :]
    depth = y.shape[len(batch) : len(batch) + len(inner)]
    x = x.reshape((*outer, _size(tall), _size(depth)))
    y = y.reshape((*outer, _size(depth), _size(wide)))
    return [*batch, *rows, *columns], torch.matmul(x, y).reshape((*outer, *tall, *wide))


def _summed(x: Tensor, names: list[str], needed: set[str]) -> tuple[Tensor, list[str]]:
    dims = [dim for dim, name in enumerate(names) if name not in needed]
    return (x.sum(dims) if dims else x), [name for name in names if name in needed]


def _size(sizes: Sequence[Any]) -> Any:
    product: Any = 1
    for size in sizes:
        product = product * size
    return product


PRODUCTS: dict[Any, Rewrite] = {
    aten.matmul.default: _matmul,
    aten.mv.default: _matmul,
    aten.dot.default: _matmul,
    aten.vdot.default: _matmul,
    aten.einsum.default: _einsum,
}
