"""Rooms import from each other one way. This reads every import statement, deferred ones too."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Every room, and the rooms that its modules import from: no more, no less. What is listed first is imported by what
# comes later. A file at the top of the package is a room of its own.
ROOMS: dict[str, str] = {
    "errors": "",
    "common": "errors",
    "cpt_fx": "common",
    "formats": "errors",
    "native": "common",
    "quantizers": "common formats native",
    "functional": "formats quantizers",
    "integer": "common errors formats native quantizers",
    "recipes": "errors formats",
    "operators": "common errors formats recipes",
    "schedules": "common errors",
    "ir": "common errors formats integer operators quantizers recipes schedules",
    "decompose": "common ir",
    "ort": "common errors ir schedules",
    "overrides": "errors formats ir recipes schedules",
    "passes": "common decompose errors formats integer ir operators overrides quantizers recipes schedules",
    "pipeline": "errors ir overrides passes recipes schedules",
    "capture": "common errors formats ir operators overrides pipeline quantizers schedules",
    "api": "capture errors ir operators overrides pipeline recipes schedules",
    "inspection": "api capture common errors formats integer ir native operators quantizers schedules",
    "export": "api capture common errors formats inspection ir operators ort quantizers schedules",
    "study": "api capture common errors formats inspection ir recipes schedules",
    "demo": "api capture errors inspection schedules study",
    "cli": "api common demo errors export inspection ort schedules study",
    "__main__": "cli",
}

# Lines of Python in each room, at most: what a change adds, it takes away elsewhere, or it is decided here.
BUDGET = {
    "errors": 50, "common": 385, "cpt_fx": 75, "formats": 200, "native": 310, "quantizers": 1500, "functional": 150,
    "integer": 1425, "recipes": 225, "operators": 1375, "schedules": 1650, "ir": 2825, "decompose": 575, "ort": 1225,
    "overrides": 375, "passes": 1350, "pipeline": 200, "capture": 6700, "api": 275, "inspection": 3975, "export": 4250,
    "study": 3775, "demo": 300, "cli": 1100, "__main__": 25,
}  # fmt: skip

# (importer, imported) -> why this one import goes the other way. It must be deferred: inside a function.
DOORS: dict[tuple[str, str], str] = {
    ("cpt_fx.schedules", "cpt_fx.study.range_test"): "schedules.range_test is public there, and needs torch",
    ("cpt_fx.pipeline", "cpt_fx.api"): "Pipeline.transform is `transform` with other passes",
    ("cpt_fx.api", "cpt_fx.inspection.verification"): "transform proves what it has made",
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


def room_of(module: str) -> str:
    """Return the first part of a module's name below the package; that of the package itself is its own."""
    return module.split(".")[1] if "." in module else module


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


def imported(module: str, source: str, known: set[str]) -> Iterator[tuple[str, Import]]:
    """The modules of the package that a module imports, each with the statement."""
    for item in imports(ast.parse(source)):
        if item.target.partition(".")[0] == "cpt_fx":
            # `from cpt_fx.errors import X` names the module cpt_fx.errors; `from cpt_fx import errors` does too.
            yield item.target if item.target in known else item.target.rpartition(".")[0] or item.target, item


def violations(module: str, source: str, known: set[str], doors: set[tuple[str, str]]) -> list[str]:
    """What is wrong with a module's imports, one sentence each."""
    found = [
        f"{module}, line {item.line}: relative import; write the full name"
        for item in imports(ast.parse(source))
        if item.relative
    ]
    own = room_of(module)
    for target, item in imported(module, source, known):
        where = f"{module}, line {item.line}"
        if room_of(target) not in (own, *ROOMS[own].split()) and not (item.deferred and (module, target) in doors):
            found.append(f"{where}: room {own} imports {target}")
        elif module.startswith("cpt_fx.passes.") and target.startswith("cpt_fx.passes"):
            found.append(f"{where}: a pass imports another pass, {target}; move what they share to the room ir")
    return found


def test_rooms_are_in_order() -> None:
    """No room imports from one that imports from it, by whatever way round."""
    seen: set[str] = set()
    for room, others in ROOMS.items():
        assert set(others.split()) <= seen, room
        seen.add(room)


@pytest.mark.parametrize("module", modules())
def test_imports_stay_in_the_rooms(module: str) -> None:
    assert room_of(module) in ROOMS, f"{module} is in a new room: add it to ROOMS of tests/test_rooms.py"
    source = modules()[module].read_text(encoding="utf-8")
    assert violations(module, source, set(modules()), set(DOORS)) == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_all_that_are_listed(room: str) -> None:
    known = modules()
    used = {
        room_of(target)
        for module, path in known.items()
        if room_of(module) == room
        for target, _ in imported(module, path.read_text(encoding="utf-8"), set(known))
        if (module, target) not in DOORS
    }
    assert used - {room} == set(ROOMS[room].split())


def test_no_room_grows_unnoticed() -> None:
    lines: dict[str, int] = {}
    for module, path in modules().items():
        room = room_of(module)
        lines[room] = lines.get(room, 0) + len(path.read_text(encoding="utf-8").splitlines())
    assert {room: (count, BUDGET[room]) for room, count in lines.items() if count > BUDGET[room]} == {}
    slack = {
        room: (lines[room], most) for room, most in BUDGET.items() if most > lines[room] + max(50, lines[room] // 20)
    }
    assert slack == {}, "a room has shrunk: lower its budget"


def test_tests_lie_as_the_rooms_do() -> None:
    """What tests a room is in the folder of its name; a room of one file has a file."""
    folders = {room_of(module) for module, path in modules().items() if path.name != "__init__.py"} & {
        room_of(module) for module, path in modules().items() if path.name == "__init__.py"
    }
    assert [room for room in sorted(folders) if not any((ROOT / "tests" / room).rglob("test_*.py"))] == []
    assert {path.stem.removeprefix("test_") for path in (ROOT / "tests/passes").glob("test_*.py")} == {
        path.stem for path in (ROOT / "passes").glob("[a-z]*.py")
    }


def test_every_door_is_used() -> None:
    for importer, target in DOORS:
        source = modules()[importer].read_text(encoding="utf-8")
        assert target in [name for name, _ in imported(importer, source, set(modules()))], (importer, target)


def test_one_module_knows_where_the_package_lies() -> None:
    """Files move; what depends on where one lies would change without a word."""
    asking = [
        module
        for module, path in modules().items()
        if any(isinstance(node, ast.Name) and node.id == "__file__" for node in ast.walk(ast.parse(path.read_text())))
    ]
    assert asking == ["cpt_fx.common.resources"]


def test_planning_a_run_needs_no_torch() -> None:
    """A schedule can be chosen and plotted on a machine without torch, and starts at once."""
    code = "import sys, cpt_fx.schedules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


KNOWN = {"cpt_fx", "cpt_fx.errors", "cpt_fx.ir.meta", "cpt_fx.passes", "cpt_fx.passes.insert", "cpt_fx.pipeline"}


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("cpt_fx.ir.meta", "from cpt_fx.errors import Thing", ""),
        ("cpt_fx.ir.meta", "from cpt_fx import errors", ""),
        ("cpt_fx.ir.meta", "import torch\nfrom numpy import array", ""),
        ("cpt_fx.errors", "if TYPE_CHECKING:\n    from cpt_fx.pipeline import Pipeline", ""),
        ("cpt_fx.errors", "import typing\nif typing.TYPE_CHECKING:\n    import cpt_fx.pipeline", ""),
        ("cpt_fx.errors", "if TYPE_CHECKING:\n    pass\nelse:\n    import cpt_fx.pipeline", "room errors imports"),
        ("cpt_fx.errors", "from cpt_fx.pipeline import Pipeline", "room errors imports cpt_fx.pipeline"),
        ("cpt_fx.errors", "def f():\n    import cpt_fx.pipeline", "line 2"),
        ("cpt_fx.errors", "class A:\n    def f(self):\n        from cpt_fx import pipeline", "line 3"),
        ("cpt_fx.errors", "import importlib\nimportlib.import_module('cpt_fx.pipeline')", "line 2"),
        ("cpt_fx.pipeline", "import cpt_fx", "room pipeline imports cpt_fx"),
        ("cpt_fx.pipeline", "from cpt_fx import transform_everything", "room pipeline imports cpt_fx"),
        ("cpt_fx.pipeline", "from . import errors", "relative import"),
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


def paths(source: str) -> Iterator[tuple[int, str]]:
    """What a module imports from torch or a `torch_private`, and the attributes it reads below, with their lines."""
    tree, homes = ast.parse(source), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name, given in ((start + alias.name, alias.asname) for alias in node.names):
                if name.partition(".")[0] == "torch" or "torch_private" in name:
                    first = name.removeprefix(start).partition(".")[0]
                    homes[given or first] = name if start or given else first
                    yield node.lineno, name
        elif isinstance(node, ast.Call):
            yield from ((item.line, item.target) for item in imports(node) if item.target.startswith("torch."))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", ast.unparse(node)):
            root, _, rest = ast.unparse(node).partition(".")
            if root in homes:
                yield node.lineno, f"{homes[root]}.{rest}"


def private_names(source: str) -> list[str]:
    """The private names of torch in a module. Operators are none: torch.ops has them by the names in graphs."""
    return [
        f"line {line}: {path}"
        for line, path in paths(source)
        if re.search(r"\._(?!\w*__(\.|$))", path) and not path.startswith("torch.ops.")
    ]


def reasons(source: str) -> dict[str, str]:
    """The names that a `torch_private` defines, each with its docstring or the comment on its line."""
    found = {}
    for node in ast.parse(source).body:
        comments = {line: text.partition("#")[2].strip() for line, text in enumerate(source.splitlines(), 1)}
        if isinstance(node, ast.FunctionDef):
            found[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch."):
            found |= {alias.asname or alias.name: comments[alias.lineno] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            named = [each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
            found |= {each.id: comments[node.lineno] for each in named}
    return found


PRIVATE = {module: path.read_text("utf-8") for module, path in modules().items() if module.endswith(".torch_private")}
"""One module a room, and one that is apart since it imports Dynamo, which takes seconds."""


def test_what_torch_calls_private_is_in_one_module_a_room() -> None:
    """A release of torch may change it without a word: here is what to look at. What several rooms need is common."""
    assert [name for name in PRIVATE if name.count(".") > 2] == ["cpt_fx.capture.dynamo.torch_private"]
    used = set()
    for module, path in modules().items():
        source = path.read_text(encoding="utf-8")
        if module not in PRIVATE:
            assert private_names(source) == [], module
        named = {name for _, name in paths(source) if "torch_private" in name}
        assert {room_of(name) for name in named} <= {"common", room_of(module)}, module
        used |= named
    for module, source in PRIVATE.items():
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
        used |= {f"{module}.{node.id}" for node in nodes if isinstance(node.ctx, ast.Load)}
        assert {f"{module}.{name}" for name in reasons(source)} - used == set(), "not used"
        assert [name for name, reason in reasons(source).items() if not reason] == [], f"{module}: no reason"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch._C._is_tracing()", ["torch._C", "torch._C._is_tracing"]),
        ("def f():\n    return torch.fx._symbolic_trace\nimport torch", ["torch.fx._symbolic_trace"]),
        ("from torch._dynamo import config", ["torch._dynamo.config"]),
        ("import torch._dynamo.config", ["torch._dynamo.config"]),
        ("from torch.utils import _pytree as pytree", ["torch.utils._pytree"]),
        ("from torch.nn import modules as m\nm.conv._ConvNd", ["torch.nn.modules.conv._ConvNd"]),
        ("import importlib\nimportlib.import_module('torch._dynamo')", ["torch._dynamo"]),
        ("from cpt_fx.ir import torch_private as private\nprivate.A._b", ["cpt_fx.ir.torch_private.A._b"]),
        ("from cpt_fx.ir.torch_private import A", []),
        ("import torch\ntorch.__version__, torch.nn.Module.__call__", []),
        ("import torch\ntorch.ops.aten._unsafe_view.default", []),
        ("from torch import nn\nmodule: nn.Module\nmodule._parameters, nn.Linear(1, 1)._modules", []),
        ("import numpy\nnumpy._core, 'torch._C'", []),
        ("import torch_geometric\ntorch_geometric._x", []),
    ],
)
def test_the_scanner_sees_it(source: str, expected: list[str]) -> None:
    assert sorted({sentence.partition(": ")[2] for sentence in private_names(source)}) == expected


def test_a_reason_is_on_the_line_of_its_name() -> None:
    source = "import torch\nfrom torch._a import (\n    b,\n    c,  # why\n)\nd = torch._d  # why\ne: int = torch._e\n"
    found = reasons(source + 'def f():\n    """Why."""\n')
    assert found == {"b": "", "c": "why", "d": "why", "e": "", "f": "Why."}


def test_a_class_has_its_name_alone() -> None:
    """Two public classes of one name make a reader guess, and every search find both."""
    homes: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_the_runner_knows_no_pass() -> None:
    """A pass that is exchanged for another one counts like it."""
    passes = {"Annotate", "Bind", "Insert", "Lower", "Normalize", "Decompose", "Share", "Verify"}
    known = [
        (module, ast.unparse(node))
        for module, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("isinstance", "issubclass")
        and passes & {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    ]
    assert known == []
