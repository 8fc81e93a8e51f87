"""Everything around operators: branches, loops, containers, blocks, checkpoints, hooks, contexts, torch.func."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.scope import Production, Scope

DEEPEST = 2

HOOKS = (
    "def doubled(module, args, output):\n    return output * 2\n",
    "def shifted(module, args):\n    return tuple(value + 1 for value in args)\n",
    "def seen(module, args, output):\n    return None\n",
)


def simple(s: Scope) -> str:
    """Return an expression that keeps the shape and multiplies."""
    layer = s.layer("linear", f"nn.Linear({s.last}, {s.last})")
    s.calls.append(layer)
    return s.one(
        (f"{layer}(h)", f"h @ {s.parameter(s.last, s.last)}", f"torch.tanh({layer}(h))", f"F.relu({layer}(h), True)")
    )


def branch(s: Scope) -> str:
    flag = s.make("flag", s.one(("True", "False", "3")))
    s.need(s.h.ndim >= 1)
    question = s.one(
        (
            "self.training",
            "not self.training",
            flag,
            "h.shape[0] > 2",
            "h.ndim == 3",
            f"{flag} is not None",
            "h.dtype == torch.float32",
            "h.requires_grad",
            "torch.is_grad_enabled()",
            "isinstance(h, Tensor)",
        )
    )
    other = s.one(("", f"\nelse:\n    h = {simple(s)}", "\nelse:\n    h = h * 0.5"))
    return f"if {question}:\n    h = {simple(s)}{other}"


def branch_on_value(s: Scope) -> str:
    s.need(s.h.numel())
    question = s.one(("h.detach().mean().item() > 0", "float(h.detach().sum()) > 0", "h.mean() > 0", "(h > 5).any()"))
    return f"if {question}:\n    h = {simple(s)}\nelse:\n    h = {simple(s)}"


def loop(s: Scope) -> str:
    count, kind = s.one((2, 3)), s.chance.randrange(5)
    made = [f"nn.Linear({s.last}, {s.last})" for _ in range(count)]
    if kind == 0:
        name = s.layer("layers", f"nn.ModuleList([{', '.join(made)}])")
        return s.one(
            (f"for layer in {name}:\n    h = torch.tanh(layer(h))", f"for i in range({count}):\n    h = {name}[i](h)")
        )
    if kind == 1:
        text = ", ".join(f'"{key}": {text}' for key, text in zip("abc", made, strict=False))
        name = s.layer("parts", f"nn.ModuleDict({{{text}}})")
        return s.one(
            (
                f'h = {name}["a"](h) + {name}["b"](h)',
                f"for key, layer in {name}.items():\n    h = layer(h) * 0.7",
                f"for key in {name}:\n    h = {name}[key](h)",
            )
        )
    if kind == 2:
        return f"for i in range({count}):\n    h = {simple(s)}"
    if kind == 3:
        return f"steps = 0\nwhile steps < {count}:\n    h = {simple(s)}\n    steps += 1"
    w = s.parameter(s.last, s.last)
    return f"h = torch.stack([row @ {w} for row in h.unbind(0)])"


def comprehension(s: Scope) -> str:
    s.need(s.h.ndim >= 2 and s.last % 2 == 0)
    layers = s.layer("layers", f"nn.ModuleList([nn.Linear({s.last // 2}, {s.size()}) for _ in range(2)])")
    return f"h = torch.cat([layer(part) for layer, part in zip({layers}, h.chunk(2, -1))], dim=-1)"


def block(s: Scope, draw: Callable[[Scope, int], None]) -> tuple[str, bool]:
    """Draw a class of its own; return a call of it, and whether it keeps the shape."""
    s.need(s.depth < DEEPEST)
    inner = Scope(s.shared, s.h.detach().clone().requires_grad_(), s.depth + 1)
    draw(inner, s.one((1, 2, 3, 4)))
    s.need(inner.lines)
    name = s.shared.name("Block")
    s.shared.define(inner.text(name))
    layer = s.layer("block", f"{name}()")
    return layer, inner.h.shape == s.h.shape and inner.h.dtype == s.h.dtype


def blocks(draw: Callable[[Scope, int], None]) -> dict[Production, float]:
    """Return what needs a class of its own, drawn by a function that is handed in."""

    def plain(s: Scope) -> str:
        layer, same = block(s, draw)
        ways = [f"h = {layer}(h)"]
        if same:
            s.calls.append(layer)
            ways += [f"h = h + {layer}(h)", f"h = {layer}({layer}(h))", f"for _ in range(2):\n    h = {layer}(h)"]
        return s.one(ways)

    def checkpointed(s: Scope) -> str:
        layer, _ = block(s, draw)
        return f"h = checkpoint({layer}, h, use_reentrant={s.one((False, False, True))})"

    def hooked(s: Scope) -> str:
        layer, _ = block(s, draw)
        hook = s.chance.randrange(3)
        s.shared.define(HOOKS[hook])
        ways = ("register_forward_hook(doubled)", "register_forward_pre_hook(shifted)", "register_forward_hook(seen)")
        s.start(f"{layer}.{ways[hook]}")
        return f"h = {layer}(h)"

    def frozen(s: Scope) -> str:
        layer, _ = block(s, draw)
        ways = (
            f"{layer}.requires_grad_(False)",
            f"{layer}.eval()",
            f"next({layer}.parameters()).requires_grad_(False)",
        )
        s.start(s.one(ways))
        return f"h = {layer}(h)"

    return {plain: 4, checkpointed: 2, hooked: 1.2, frozen: 1}


def checkpointed_code(s: Scope) -> str:
    reentrant = s.one((False, False, True))
    a, b = simple(s), simple(s)
    if s.often(0.3):
        stack = s.layer("stack", f"nn.Sequential(nn.Linear({s.last}, 6), nn.ReLU(), nn.Linear(6, 5))")
        return f"h = checkpoint_sequential({stack}, 2, h, use_reentrant={reentrant})"
    return f"def run(h):\n    h = {a}\n    return {b}\nh = checkpoint(run, h, use_reentrant={reentrant})"


def context(s: Scope) -> str:
    product = simple(s)
    ways = [
        f"with torch.no_grad():\n    aside = {product}\nh = h + aside.mean()",
        f"h = h + ({product}).detach()",
        "with torch.no_grad():\n    scale = h.abs().amax() + 1\nh = h / scale",
        f"with contextlib.nullcontext():\n    h = {product}",
        f"h = {product} + {product}.detach() * 0",
        f"with torch.enable_grad():\n    h = {product}",
        f"with torch.set_grad_enabled(self.training):\n    h = {product}",
        "h = h.detach() * 0.5 + h * 0.5",
    ]
    if s.h.dtype.itemsize == 4:
        ways += [f'with torch.autocast("cpu", dtype=torch.bfloat16):\n    h = {product}\nh = h.float()'] * 2
    return s.one(ways)


def broken(s: Scope) -> str:
    """Something that no graph of Dynamo can hold."""
    product = simple(s)
    return (
        s.one(
            (
                "torch._dynamo.graph_break()",
                "mean = h.detach().mean().item()",
                "torch.compiler.is_compiling()",
                'print("on", end="")',
            )
        )
        + f"\nh = {product}"
    )


def of_functions(s: Scope) -> str:
    """torch.func, and gradients inside of `forward`."""
    s.need(s.h.ndim == 2 and min(s.shape) > 0)
    w = s.parameter(s.last, s.last)
    ways = [
        f"h = torch.func.vmap(lambda row: row @ {w})(h)",
        f"h = torch.vmap(lambda row: torch.dot(row, row) * {w}[0])(h)",
        f"h = torch.func.grad(lambda v: (v @ {w}).square().sum())(h) * 0.3",
        f"h = torch.func.vmap(lambda row, other: {w} @ row + other)(h, h)",
        f"h = torch.func.jvp(lambda v: v @ {w}, (h,), (h.cos(),))[1]",
    ]
    return s.one(ways)


def tensor_hook(s: Scope) -> str:
    return f"h = {simple(s)}\nif h.requires_grad:\n    h.register_hook(lambda gradient: gradient * 2)"


def custom_function(s: Scope) -> str:
    s.shared.define(
        "class Cubed(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        ctx.save_for_backward(x)\n        return x * x * x\n\n"
        "    @staticmethod\n    def backward(ctx, gradient):\n"
        "        (x,) = ctx.saved_tensors\n        return gradient * 3 * x * x\n"
    )
    return f"h = Cubed.apply(torch.tanh({simple(s)}))"


def method(s: Scope) -> str:
    """A function above the model that multiplies."""
    s.shared.define("def project(value, weight):\n    return value @ weight\n")
    return f"h = project(h, {s.parameter(s.last, s.size())})"


CONTROL: dict[Production, float] = {
    branch: 3,
    branch_on_value: 0.8,
    loop: 3,
    comprehension: 1,
    checkpointed_code: 1.2,
    context: 2.5,
    broken: 0.8,
    of_functions: 0.5,
    tensor_hook: 0.5,
    custom_function: 0.4,
    method: 0.7,
}
