"""There is one list of operators: no other module of the package keeps a table of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    # How an operator is written in others that ONNX has: a function for each. Products are not among them.
    *(f"cpt_fx/export/{name}.py" for name in ("backward", "functions", "operators", "recording", "training")),
    # No operators: expressions of sizes, and what code may ask torch about its modes.
    "cpt_fx/capture/input_checks.py", "cpt_fx/capture/symbolic/questions.py",
}  # fmt: skip


def operators_in(value: ast.AST) -> set[str]:
    """Return the operators of torch that an expression names, as attributes or in strings."""
    found = set()
    for node in ast.walk(value):
        text = node.value if isinstance(node, ast.Constant) else node.attr if isinstance(node, ast.Attribute) else ""
        name = str(text).removeprefix("aten.").removeprefix("aten::").partition(".")[0]
        if name.isidentifier() and torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
            found.add(name)
    return found


def tables(code: str) -> Iterator[set[str]]:
    """Return the operators in each table of a module: what is assigned outside of functions, or a display anywhere."""
    tree = ast.parse(code)
    for statement in tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            yield operators_in(statement.value)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Set, ast.List, ast.Tuple, ast.Dict, ast.Call)):
            # What a call calls is no entry of a table: a chain of methods names one operator after another.
            inside = (part for part in ast.iter_child_nodes(node) if part is not getattr(node, "func", None))
            parts = (part for part in inside if isinstance(part, (ast.Constant, ast.Attribute)))
            yield set().union(*map(operators_in, parts))


def test_no_other_module_keeps_a_table_of_operators() -> None:
    kept = {
        str(path.relative_to(ROOT)): sorted(found)
        for folder in ("cpt_fx", "passes")
        for path in (ROOT / folder).rglob("*.py")
        for found in tables(path.read_text())
        if len(found) >= 5 and path.parent.name != "operators"
    }
    assert kept.keys() == ELSEWHERE, kept


def test_a_table_is_seen() -> None:
    assert operators_in(ast.parse("{'mm', F.relu, torch.ops.aten.add.Tensor, 'no operator'}")) == {"mm", "relu", "add"}
    inside = "def look(node):\n    return node.target in (torch.mm, torch.bmm, torch.mv, torch.dot, torch.addmm)"
    assert max(map(len, tables(inside))) == 5
    assert max(map(len, tables("y.reshape(-1).neg().square().relu().exp()"))) == 0
