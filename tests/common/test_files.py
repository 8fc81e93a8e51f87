"""Files and directories are written completely or not at all; names are imported when they are used."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from cpt_fx.common.arrays import array_of
from cpt_fx.common.files import digest, new_directory, new_file, replace
from cpt_fx.common.lazy import on_first_use
from cpt_fx.errors import ExportError


def held(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_file_is_replaced_with_its_weights(tmp_path: Path) -> None:
    target = tmp_path / "new" / "model.onnx"
    with new_file(target, overwrite=False) as path:
        path.write_text("graph 1")
        path.with_name(f"{path.name}.data").write_text("weights 1")
        assert held(tmp_path / "new").keys().isdisjoint({"model.onnx"})
    assert held(tmp_path) == {"new/model.onnx": "graph 1", "new/model.onnx.data": "weights 1"}
    with pytest.raises(ExportError, match="exists: name another file"), new_file(target, overwrite=False):
        raise AssertionError
    with new_file(target, overwrite=True) as path:
        path.write_text("graph 2")
    assert held(tmp_path) == {"new/model.onnx": "graph 2"}  # the old weights belong to no model


def test_a_directory_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "made"
    for number in (1, 2):
        with new_directory(target, overwrite=number == 2) as made:
            (made / f"file {number}").write_text("")
    assert held(tmp_path) == {"made/file 2": ""}
    with pytest.raises(ExportError, match="is not empty"), new_directory(target, overwrite=False):
        raise AssertionError


@pytest.mark.parametrize("make", [new_file, new_directory])
def test_a_failure_leaves_what_was_there(make: Callable[..., AbstractContextManager[Path]], tmp_path: Path) -> None:
    target = tmp_path / "target"
    if make is new_file:
        target.write_text("old")
    else:
        target.mkdir()
        (target / "old").write_text("old")
    before = held(tmp_path)
    with pytest.raises(KeyError), make(target, overwrite=True) as made:
        (made if make is new_file else made / "half").write_text("half")
        raise KeyError
    assert held(tmp_path) == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("make", "said"), [(new_file, "is a directory"), (new_directory, "is a file")])
def test_the_other_kind_is_refused(
    make: Callable[..., AbstractContextManager[Path]], said: str, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir() if make is new_file else target.write_text("")
    with pytest.raises(ExportError, match=said), make(target, overwrite=True):
        raise AssertionError


def test_a_small_file_is_moved_into_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "choice.json"
    replace(target, "old")
    plain = tmp_path / "plain"
    plain.write_text("old")
    assert target.stat().st_mode == plain.stat().st_mode  # a temporary file would be its owner's alone
    plain.unlink()

    def fail(*places: object) -> None:
        raise OSError

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError):
        replace(target, b"new")
    assert held(tmp_path) == {"choice.json": "old"}
    assert digest(target) == hashlib.sha256(b"old").hexdigest()


def test_a_lazy_name_is_imported_once_and_checked_first() -> None:
    asked: list[str] = []
    module = sys.modules[__name__]
    get, names = on_first_use(__name__, {"OrderedDict": "collections", "abc": "abc"}, asked.append)
    assert {"OrderedDict", "held"} <= set(names())
    assert get("OrderedDict").__module__ == "collections" and asked == ["OrderedDict"]
    assert vars(module).pop("OrderedDict")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        get("nothing")


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, cpt_fx; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_array_shares_memory_and_a_conjugate_is_resolved() -> None:
    x = torch.zeros(4, requires_grad=True)
    array_of(x)[:] = 1
    assert x.tolist() == [1, 1, 1, 1]
    x.untyped_storage().resize_(0)  # as `fully_shard` frees memory
    assert array_of(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]
