"""Imports go one way, from a higher layer to a lower one. This reads every import statement, deferred ones too."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module may import from its own layer and from lower ones. A name stands for itself and for everything below it,
# "cpt_fx" alone only for itself. A pass imports no other pass.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("cpt_fx.errors", "cpt_fx.files", "cpt_fx.formats", "cpt_fx.lazy", "cpt_fx.schedules"),
    (
        "cpt_fx.integer",
        "cpt_fx.native",
        "cpt_fx.noise",
        "cpt_fx.arrays",
        "cpt_fx.numerics",
        "cpt_fx.evidence",
        "cpt_fx.frames",
        "cpt_fx.transformed",
        "cpt_fx.widths",
        "cpt_fx.layer_state",
        "cpt_fx.result",
        "cpt_fx.straight_through",
        "cpt_fx.watched",
        "cpt_fx.saving",
        "cpt_fx.ops",
        "cpt_fx.functional",
        "cpt_fx.recipes",
        "cpt_fx.operators",
        "cpt_fx.meta",
        "cpt_fx.graph_sites",
        "cpt_fx.overrides",
        "cpt_fx.names",
        "cpt_fx.regions",
        "cpt_fx.aten",
    ),
    (
        "cpt_fx.aliasing",
        "cpt_fx.bodies",
        "cpt_fx.opening",
        "cpt_fx.pass_base",
        "cpt_fx.spec",
        "cpt_fx.runtime",
        "cpt_fx.values",
        "cpt_fx.reminders",
        "cpt_fx.graph_module",
    ),
    ("cpt_fx.passes",),
    (
        "cpt_fx.pipeline",
        "cpt_fx.capture",
        "cpt_fx.session",
        "cpt_fx.standalone",
        "cpt_fx.api",
        "cpt_fx.inspection",
        "cpt_fx.costs",
        "cpt_fx.recalibrating",
        "cpt_fx.range_test",
        "cpt_fx.dynamo",
        "cpt_fx.history",
        "cpt_fx.proof",
        "cpt_fx.trial",
        "cpt_fx.export",
        "cpt_fx.ort",
    ),
    ("cpt_fx.demo", "cpt_fx.report", "cpt_fx.study", "cpt_fx.cli"),
    ("cpt_fx", "cpt_fx.__main__"),
)

# (importer, imported) -> why this one import may go up. It must be deferred: inside a function.
DOORS: dict[tuple[str, str], str] = {
    ("cpt_fx.schedules", "cpt_fx.range_test"): "schedules.range_test is public there, and needs torch and transform",
}


@dataclass(frozen=True)
class Import:
    """One imported module and where the statement stands."""

    target: str
    line: int
    deferred: bool
    relative: bool = False


def modules() -> dict[str, Path]:
    """Every module of the package by its real name; the link cpt_fx/passes is replaced by the folder it leads to."""
    files = [path for path in (ROOT / "cpt_fx").rglob("*.py") if (ROOT / "cpt_fx" / "passes") not in path.parents]
    names = {path: path.relative_to(ROOT) for path in files}
    names |= {path: Path("cpt_fx") / path.relative_to(ROOT) for path in (ROOT / "passes").rglob("*.py")}
    return {".".join(name.with_suffix("").parts).removesuffix(".__init__"): path for path, name in names.items()}


def layer_of(module: str) -> int | None:
    for level, names in enumerate(LAYERS):
        for name in names:
            if fnmatchcase(module, name) or (name != "cpt_fx" and fnmatchcase(module, f"{name}.*")):
                return level
    return None


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def imports(node: ast.AST, deferred: bool = False) -> Iterator[Import]:
    """All imports of the package's own modules below a node, `import_module("cpt_fx...")` included."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, deferred)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield Import(f"{node.module or ''}.{alias.name}", node.lineno, deferred, relative=node.level > 0)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"import_module", "importlib.import_module"}:
        yield from (
            Import(argument.value, node.lineno, deferred)
            for argument in node.args[:1]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        )
    if isinstance(node, ast.If) and is_type_checking(node.test):
        children: list[ast.AST] = [*node.orelse]
    else:
        children = [*ast.iter_child_nodes(node)]
    inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in children:
        yield from imports(child, inside)


def violations(module: str, source: str, known: set[str], doors: set[tuple[str, str]]) -> list[str]:
    """What is wrong with a module's imports, one sentence each."""
    found = []
    own = layer_of(module)
    assert own is not None, f"{module} has no layer"
    for item in imports(ast.parse(source)):
        where = f"{module}, line {item.line}"
        if item.relative:
            found.append(f"{where}: relative import; write the full name")
            continue
        if item.target.partition(".")[0] != "cpt_fx":
            continue
        # `from cpt_fx.errors import X` names the module cpt_fx.errors; `from cpt_fx import errors` does too.
        target = item.target if item.target in known else item.target.rpartition(".")[0] or item.target
        level = layer_of(target)
        if level is None:
            found.append(f"{where}: imports {target}, which has no layer")
        elif level > own and not (item.deferred and (module, target) in doors):
            found.append(f"{where}: layer {own} imports {target} of layer {level}")
        elif module.startswith("cpt_fx.passes.") and target.startswith("cpt_fx.passes"):
            found.append(f"{where}: a pass imports another pass, {target}; move what they share to a lower layer")
    return found


@pytest.mark.parametrize("module", modules())
def test_imports_go_down(module: str) -> None:
    assert layer_of(module) is not None, f"{module} is new: add it to its layer in LAYERS of tests/test_layering.py"
    source = modules()[module].read_text(encoding="utf-8")
    assert violations(module, source, set(modules()), set(DOORS)) == []


def test_every_door_is_used() -> None:
    for importer, imported in DOORS:
        tree = ast.parse(modules()[importer].read_text(encoding="utf-8"))
        targets = [item.target for item in imports(tree)]
        assert any(target == imported or target.startswith(f"{imported}.") for target in targets), (importer, imported)


def test_planning_a_run_needs_no_torch() -> None:
    """A schedule can be chosen and plotted on a machine without torch, and starts at once."""
    code = "import sys, cpt_fx.schedules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


KNOWN = {"cpt_fx", "cpt_fx.errors", "cpt_fx.meta", "cpt_fx.passes", "cpt_fx.passes.insert", "cpt_fx.pipeline"}


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("cpt_fx.meta", "from cpt_fx.errors import Thing", ""),
        ("cpt_fx.meta", "from cpt_fx import errors", ""),
        ("cpt_fx.meta", "import torch\nfrom numpy import array", ""),
        ("cpt_fx.errors", "if TYPE_CHECKING:\n    from cpt_fx.pipeline import Pipeline", ""),
        ("cpt_fx.errors", "import typing\nif typing.TYPE_CHECKING:\n    import cpt_fx.pipeline", ""),
        ("cpt_fx.errors", "if TYPE_CHECKING:\n    pass\nelse:\n    import cpt_fx.pipeline", "layer 0 imports"),
        ("cpt_fx.errors", "from cpt_fx.pipeline import Pipeline", "cpt_fx.pipeline of layer 4"),
        ("cpt_fx.errors", "def f():\n    import cpt_fx.pipeline", "line 2"),
        ("cpt_fx.errors", "class A:\n    def f(self):\n        from cpt_fx import pipeline", "line 3"),
        ("cpt_fx.errors", "import importlib\nimportlib.import_module('cpt_fx.pipeline')", "line 2"),
        ("cpt_fx.pipeline", "import cpt_fx", "imports cpt_fx of layer 6"),
        ("cpt_fx.pipeline", "from cpt_fx import transform_everything", "imports cpt_fx of layer 6"),
        ("cpt_fx.pipeline", "from . import errors", "relative import"),
        ("cpt_fx.pipeline", "from cpt_fx.nowhere import x", "no layer"),
        ("cpt_fx.passes.share", "from cpt_fx.passes.insert import Insert", "imports another pass"),
        ("cpt_fx.passes.share", "from cpt_fx.passes import insert", "imports another pass"),
        ("cpt_fx.passes", "from cpt_fx.passes.insert import Insert", ""),
    ],
)
def test_the_checker_sees_it(module: str, source: str, expected: str) -> None:
    found = violations(module, source, KNOWN, set())
    assert [expected in sentence for sentence in found] == ([True] if expected else [])


def test_a_door_is_deferred() -> None:
    doors = {("cpt_fx.errors", "cpt_fx.pipeline")}
    assert violations("cpt_fx.errors", "def f():\n    import cpt_fx.pipeline", KNOWN, doors) == []
    assert len(violations("cpt_fx.errors", "import cpt_fx.pipeline", KNOWN, doors)) == 1
