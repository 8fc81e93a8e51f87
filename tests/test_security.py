"""What could run code that a file or a text brought along: each place is named in docs/security.md, with its reason."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cpt_fx
from cpt_fx.errors import ExportError
from cpt_fx.ort import manifest, transfer
from cpt_fx.ort.transfer import StateFileError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "security.md"
SCANNED = ("cpt_fx", "passes", "examples", "benchmarks", "docs")
ALONE = {"eval", "exec", "compile", "__import__", "execfile"}
"""Builtins: without a module before them."""
ANYWHERE = {
    "load_module", "exec_module", "import_module", "CDLL", "PyDLL", "LoadLibrary", "load_library", "dlopen", "system",
    "popen", "run_path", "run_module", "Unpickler", "unsafe_load", "full_load", "register_custom_ops_library",
    "loads", "extractall", "extract", "unpack_archive", "load_inline", "read_pickle", "load_extension",
}  # fmt: skip
HARMLESS = {"json.loads", "platform.system"}
READERS = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "torch",
    "jit",
    "numpy",
    "np",
    "export",
}


def risks(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each call that can run what it reads, under whatever name it was imported."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    own = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}  # such as a flag `compile`
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found = _risk(_dotted(node.func, names), node)
        elif isinstance(node, ast.Name) and node.id in ALONE - own and id(node) not in called:
            found = node.id  # handed on under another name
        elif isinstance(node, ast.ClassDef):
            found = next((base for one in node.bases if (base := _dotted(one, names)).endswith("Unpickler")), "")
        else:
            continue
        if found:
            yield node.lineno, found


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def _risk(name: str, call: ast.Call) -> str:
    """Return the name of a call that can run what it reads, or nothing."""
    *before, last = name.split(".")
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    home = before[-1] if before else ""
    if last in ALONE:
        return last if home in ("", "builtins") else ""
    if last == "load" and home in READERS:
        arrays = home in ("np", "numpy") and "allow_pickle" not in given and len(call.args) < 3
        return "" if arrays or (home == "torch" and given.get("weights_only") == "True") else name
    if given.get("allow_pickle", "False") != "False" or given.get("shell", "False") != "False":
        return name
    if last == "extractall" and given.get("filter") == "'data'":
        return ""
    # What is written out in the source, as in an import, is chosen by nobody else.
    written = ast.unparse(call.args[0]) if call.args else ""
    if last in ("import_module", "CDLL") and written.startswith(("'", "f'cpt_fx.")):
        return ""
    return name if last in ANYWHERE and name not in HARMLESS else ""


def found_in(folder: str) -> dict[str, set[str]]:
    """Return the names of such calls by file."""
    made: dict[str, set[str]] = {}
    for path in sorted(Path(ROOT, folder).rglob("*.py")):
        if path.is_relative_to(ROOT / "cpt_fx" / "passes"):  # the folder `passes` under its other name
            continue
        for _, name in risks(path.read_text(encoding="utf-8")):
            made.setdefault(path.relative_to(ROOT).as_posix(), set()).add(name)
    return made


@pytest.mark.slow
def test_every_such_call_is_named_on_the_page() -> None:
    found = {(path, name) for folder in SCANNED for path, names in found_in(folder).items() for name in names}
    table = PAGE.read_text(encoding="utf-8").partition("## Calls that could run code")[2]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    listed = {(row[1].strip().strip("`"), row[2].strip().strip("`")) for row in rows}
    assert found - listed == set(), "new: can it run what a file or another person's text holds? Then not; else list it"
    assert listed - found == set(), "these are gone: take them off docs/security.md"


@pytest.mark.parametrize(
    "line",
    [
        "eval(text)", "exec(text)", "import builtins\nbuiltins.eval(text)", "run = eval", "map(eval, texts)",
        "compile(text, 'a', 'exec')", "__import__(name)", "import pickle\npickle.load(file)",
        "import pickle as p\np.loads(data)", "from pickle import load\nload(file)",
        "from pickle import loads as l\nl(d)",
        "from pickle import Unpickler\nUnpickler(file).load()", "import marshal\nmarshal.loads(data)",
        "import pickle\nclass Mine(pickle.Unpickler): ...", "torch.load(path)", "torch.load(path, weights_only=False)",
        "from torch import load\nload(path)", "np.load(path, allow_pickle=True)",
        "import numpy\nnumpy.load(p, None, True)",
        "numpy.lib.npyio.read_array(file, allow_pickle=True)", "yaml.load(text)", "yaml.unsafe_load(text)",
        "torch.jit.load(path)", "torch.export.load(path)", "ctypes.CDLL(path)", "torch.ops.load_library(path)",
        "os.system(text)", "subprocess.run(text, shell=True)", "tar.extractall(folder)", "archive.extract(name)",
        "importlib.import_module(name)", "spec.loader.exec_module(module)", "options.register_custom_ops_library(path)",
        "connection.load_extension(path)", "pandas.read_pickle(path)", "importlib.import_module(f'{name}')",
    ],
)  # fmt: skip
def test_the_scan_sees(line: str) -> None:
    assert list(risks(line))


@pytest.mark.parametrize(
    "line",
    [
        "import json\njson.loads(text)", "ast.literal_eval(text)", "re.compile(text)",
        "torch.load(p, weights_only=True)",
        "model.eval()", "np.load(path)", "torch.compile(model)", "tar.extractall(folder, filter='data')",
        "def f(compile): return 1 if compile else 2", "import_module('numpy')", "platform.system()",
        "import_module(f'cpt_fx.{name}')", "ctypes.CDLL('libcuda.so.1')", "store.load(path)",
    ],
)  # fmt: skip
def test_the_scan_leaves_alone(line: str) -> None:
    assert not list(risks(line))


@pytest.mark.parametrize(
    "arrays",
    [
        {}, {"facts": np.array("nonsense")}, {"facts": np.array("[" * 100_000)}, {"facts": np.array("{}")},
        {"facts": np.array("[]")}, {"facts": np.zeros(3)}, {"facts": np.array([None, print], object)},
        {"facts": np.array("{}"), "parameter a": np.array([print], object)},
    ],
    ids=str,
)  # fmt: skip
def test_a_saved_run_is_numbers_or_an_error(arrays: dict[str, Any], tmp_path: Path) -> None:
    """Also where somebody made the checksum fit."""
    path = tmp_path / "state"
    with path.open("wb") as file:
        np.savez(file, **arrays)
    path.write_bytes(path.read_bytes() + hashlib.sha256(path.read_bytes()).digest())
    with pytest.raises(StateFileError):
        transfer.read(path)


def test_a_manifest_is_data_or_an_error(tmp_path: Path) -> None:
    for text in ("[" * 100_000, "null", '{"format": 1, "inputs": 3}', '{"format": 1' + "0" * 5000 + "}", "\x00"):
        (tmp_path / manifest.NAME).write_text(text)
        with pytest.raises(ExportError):
            manifest.read(tmp_path)


def test_a_program_imports_no_module_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpt_fx_named_by_a_file.py").write_text("class Layer: ...")
    monkeypatch.syspath_prepend(tmp_path)
    program: Any = torch.export.export(nn.Sequential(nn.Linear(2, 2)), (torch.randn(3, 2),))
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack", {})
        node.meta["nn_module_stack"] = {key: (path, "cpt_fx_named_by_a_file.Layer") for key, (path, _) in stack.items()}
    cpt_fx.transform(program, cpt_fx.schedules.Static(8))
    assert "cpt_fx_named_by_a_file" not in sys.modules
