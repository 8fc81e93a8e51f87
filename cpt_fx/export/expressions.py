"""Bodies of ONNX functions written as expressions, such as `scale = Max(span / levels, 1e-8)`.

A call is the ONNX operator of that name, and its keywords are attributes. `3` is an int64 and `3.0` a float32;
`uint64(3)` and `int64([3])` are constants of these types, `float64(x)` is a cast. `attribute.name` is an attribute of
the function itself. Text of this form may be put together: every statement is one, wherever it is indented.
"""

from __future__ import annotations

import ast

_TYPES = {
    "float32": ("float", 1), "int32": ("int32", 6), "int64": ("int64", 7), "bool": ("bool", 9),
    "float64": ("double", 11), "uint32": ("uint32", 12), "uint64": ("uint64", 13),
}  # fmt: skip
"""What ONNX's text form calls them, and their numbers."""
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Div: "Div", ast.Mod: "Mod", ast.USub: "Neg",
    ast.Lt: "Less", ast.LtE: "LessOrEqual", ast.Gt: "Greater", ast.GtE: "GreaterOrEqual", ast.Eq: "Equal",
    ast.Or: "Or", ast.And: "And", ast.Not: "Not",
    ast.BitOr: "BitwiseOr", ast.BitAnd: "BitwiseAnd", ast.BitXor: "BitwiseXor",
    ast.LShift: 'BitShift <direction = "LEFT">', ast.RShift: 'BitShift <direction = "RIGHT">',
}  # fmt: skip


def onnx_text(body: str) -> str:
    """Return a body in ONNX's text form, one operator to a line."""
    writer = _Writer()
    for statement in ast.parse("\n".join(line.strip() for line in body.splitlines())).body:
        assert isinstance(statement, ast.Assign), ast.unparse(statement)
        writer.write(ast.unparse(statement.targets[0]).strip("()"), statement.value)
    return "\n".join(writer.lines)


class _Writer:
    """Writes expressions from the inside out."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, str] = {}

    def write(self, names: str, node: ast.expr) -> None:
        """Write what computes an expression, its outermost operator under the names of the outputs."""
        match node:
            case ast.Name():
                call = f"Identity ({node.id})"
            case ast.BinOp(left, operator, right) | ast.Compare(left, [operator], [right]):
                call = self._call(_OPERATORS[type(operator)], left, right)
            case ast.BoolOp(operator, [left, right]):
                call = self._call(_OPERATORS[type(operator)], left, right)
            case ast.UnaryOp(operator, operand) if _constant(node) is None:
                call = self._call(_OPERATORS[type(operator)], operand)
            case ast.Call(ast.Name(kind), [operand]) if kind in _TYPES and _constant(node) is None:
                call = self._call(f"Cast <to = {_TYPES[kind][1]}>", operand)
            case ast.Call(ast.Name(operator), operands, keywords) if _constant(node) is None:
                said = ", ".join(_attribute(str(keyword.arg), keyword.value) for keyword in keywords)
                call = self._call(f"{operator} <{said}>" if said else operator, *operands)
            case _:
                call = f"Constant <value = {_constant(node)}> ()"
        self.lines.append(f"{names} = {call}")

    def _call(self, operator: str, *operands: ast.expr) -> str:
        return f"{operator} ({', '.join(map(self._name, operands))})"

    def _name(self, node: ast.expr) -> str:
        """Return the name of a value, which is computed now if it has none."""
        if isinstance(node, ast.Name):
            return node.id
        constant = _constant(node)
        known = None if constant is None else self.constants.get(constant)
        if known is not None:
            return known
        if constant is not None:
            name = self.constants[constant] = f"constant_{len(self.constants)}"
            self.write(name, node)
            return name
        self.write("", node)
        # Named by the line it stands in, which is known only now: its operands were written before it.
        name = f"value_{len(self.lines)}"
        self.lines[-1] = name + self.lines[-1]
        return name


def _constant(node: ast.expr) -> str | None:
    """Return a number, or a list of numbers, with its type, as ONNX's text form writes it; None for anything else."""
    kind = ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _TYPES:
        kind, node = _TYPES[node.func.id][0], node.args[0]
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    if isinstance(value, list):
        return f"{kind}[{len(value)}] {{{', '.join(map(repr, value))}}}"
    usual = {bool: "bool", int: "int64", float: "float"}[type(value)]
    return f"{kind or usual} {{{value + 0!r}}}"


def _attribute(name: str, node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name}: {'tensor' if name == 'value' else 'float'} = @{node.attr}"
    return f"{name} = {ast.unparse(node)}".replace("'", '"')
