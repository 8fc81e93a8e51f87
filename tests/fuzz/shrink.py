"""A failing model, made smaller for as long as the same oracle says no in the same frontend."""

from __future__ import annotations

import ast
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

Fails = Callable[[str], bool]

Find = Callable[[ast.Module], Iterator[Callable[[], Any]]]

FIXED = ("Model", "inputs", "schedule", "options")
SIMPLER_OPTIONS = ("return dict(recipe=recipes.default())", "return dict(recipe=nearest(recipes.default()))")
SIMPLER_SCHEDULE = "return Static(4)"


def shrunk(source: str, fails: Fails, seconds: float = 60.0) -> str:
    """Return the smallest source that was found and that still fails."""
    until = time.monotonic() + seconds
    for name, texts in (("options", SIMPLER_OPTIONS), ("schedule", (SIMPLER_SCHEDULE,))):
        for text in texts:
            simple = _with_body(source, name, text)
            if simple != source and fails(simple):
                source = simple
                break
    changed = True
    while changed:
        changed = False
        for find in (_without_statement, _without_wrapper, _without_argument, _simpler_expression):
            index = 0
            while (smaller := _changed(source, find, index)) is not None and time.monotonic() < until:
                if smaller != source and fails(smaller):
                    source, changed = smaller, True
                else:
                    index += 1
    return tidy(source)


def tidy(source: str) -> str:
    """Leave out the imports and definitions that nothing names."""
    tree = ast.parse(source)
    changed = True
    while changed:
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        kept = [node for node in tree.body if _needed(node, used)]
        changed = len(kept) < len(tree.body)
        tree.body = kept
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [name for name in node.names if (name.asname or name.name).partition(".")[0] in used]
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _needed(node: ast.stmt, used: set[str]) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return any((name.asname or name.name).partition(".")[0] in used for name in node.names)
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return node.name in used or node.name in FIXED
    return True


def _with_body(source: str, function: str, text: str) -> str:
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            node.body = ast.parse(f"def f():\n    {text}").body[0].body  # type: ignore[attr-defined]
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _changed(source: str, find: Find, index: int) -> str | None:
    """Return source with one of the changes that are found in it; None where there are not so many."""
    tree = ast.parse(source)
    changes = list(find(tree))
    if index >= len(changes):
        return None
    changes[index]()
    try:
        return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    except Exception:  # nothing that could be written
        return source


def _bodies(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body:
                yield body


def _is_fixed(node: ast.stmt) -> bool:
    """Whether a statement is part of the form of every case."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return node.name in (*FIXED, "forward", "__init__")
    return isinstance(node, ast.Return) or "super().__init__" in ast.unparse(node)


def _without_statement(tree: ast.Module) -> Iterator[Callable[[], Any]]:
    """Take a statement away, the last ones first: what is behind the fault matters least."""
    for body in _bodies(tree):
        for index in reversed(range(len(body))):
            if not _is_fixed(body[index]):
                yield lambda body=body, index=index: _remove(body, index)  # type: ignore[misc]


def _remove(body: list[ast.stmt], index: int) -> None:
    del body[index]
    if not body:
        body.append(ast.Pass())


def _without_wrapper(tree: ast.Module) -> Iterator[Callable[[], Any]]:
    """Put what is inside of a branch, a loop or a context in its place."""
    for body in _bodies(tree):
        for index, node in enumerate(body):
            if isinstance(node, (ast.If, ast.With, ast.While)):
                yield lambda body=body, index=index, node=node: body.__setitem__(slice(index, index + 1), node.body)  # type: ignore[misc]


def _without_argument(tree: ast.Module) -> Iterator[Callable[[], Any]]:
    """Take away an argument by name, a default, or a part of a list."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for index in range(len(node.keywords)):
                yield lambda node=node, index=index: node.keywords.pop(index)  # type: ignore[misc]
            if len(node.args) > 1:
                yield lambda node=node: node.args.pop()  # type: ignore[misc]
        elif isinstance(node, (ast.Tuple, ast.List)) and len(node.elts) > 1:
            for index in range(len(node.elts)):
                yield lambda node=node, index=index: node.elts.pop(index)  # type: ignore[misc]


def _simpler_expression(tree: ast.Module) -> Iterator[Callable[[], Any]]:
    """Put an operand in the place of an operation, and the argument of a call in the place of the call."""
    for node in ast.walk(tree):
        for name, value in list(ast.iter_fields(node)):
            if isinstance(value, ast.BinOp):
                for part in (value.left, value.right):
                    yield lambda node=node, name=name, part=part: setattr(node, name, copy.deepcopy(part))  # type: ignore[misc]
            elif isinstance(value, ast.Call) and value.args and isinstance(node, (ast.Assign, ast.Return)):
                first = value.args[0]
                if isinstance(first, (ast.Name, ast.Call)):
                    yield lambda node=node, name=name, first=first: setattr(node, name, copy.deepcopy(first))  # type: ignore[misc]
