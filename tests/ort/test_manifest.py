"""What a directory says of itself: every kind of damage is refused, with a reason, before anything is trained."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from cpt_fx.errors import ExportError
from cpt_fx.ort import Trainer
from cpt_fx.ort import manifest as files
from tests import ort

Place = tuple[Any, ...]
REPLACED: tuple[Any, ...] = (None, True, -7, 0.5, "other", [], {}, [None], {"other": None})


@pytest.fixture(scope="module")
def values() -> Any:
    return json.loads((ort.net_directory() / files.NAME).read_text())


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ort.net_directory(), tmp_path / "exported"))


def places(values: Any, place: Place = ()) -> Iterator[Place]:
    """Every entry of the manifest, at whatever depth."""
    inner = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in inner:
        yield (*place, key)
        yield from places(value, (*place, key))


def damages(values: Any) -> Iterator[tuple[str, Any]]:
    """The manifest with one entry replaced, missing or added, one after the other."""
    for place in places(values):
        *path, last = place

        def changed(path: list[Any] = path) -> tuple[Any, Any]:
            made = copy.deepcopy(values)
            holder = made
            for key in path:
                holder = holder[key]
            return made, holder

        for other in REPLACED:
            made, holder = changed()
            if holder[last] != other or type(holder[last]) is not type(other):
                holder[last] = other
                yield f"{place} = {other!r}", made
        made, holder = changed()
        del holder[last]
        yield f"{place} is missing", made
        made, holder = changed()
        if isinstance(holder, dict):
            holder["other"] = holder[last]
        else:
            holder.append(holder[last])
        yield f"{place} twice", made


def test_it_comes_back_as_it_was_written(copied: Path) -> None:
    made = files.read(copied)
    before = (copied / files.NAME).read_bytes()
    made.write(copied)
    assert (copied / files.NAME).read_bytes() == before
    assert files.read(copied) == made


def test_every_damage_is_seen(copied: Path, values: Any) -> None:
    """The digest of what it says does not fit any more."""
    count = 0
    for what, damaged in damages(values):
        (copied / files.NAME).write_text(json.dumps(damaged))
        with pytest.raises(ExportError, match="export again"):
            files.read(copied)
            pytest.fail(f"accepted: {what}")
        count += 1
    assert count > 84


def test_every_wrong_type_is_named(copied: Path, values: Any) -> None:
    """Where somebody made the digest fit: what has another form than the manifest's is refused; what has its form comes
    back as it is."""
    refused = 0
    for what, damaged in damages({name: value for name, value in values.items() if name != "digest"}):
        text = json.dumps(damaged | {"digest": files.digest_of(damaged)})
        (copied / files.NAME).write_text(text)
        try:
            made = files.read(copied)
        except ExportError as error:
            assert "export again" in str(error), what
            refused += 1
        else:
            made.write(copied)
            assert json.loads((copied / files.NAME).read_text()) == json.loads(text), what
    assert refused > 84


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "7", '"format"', "{}", "[" * 100_000, '{"format": 4}', '{"format": NaN}', "\udcff"]
)
def test_what_is_no_manifest(copied: Path, text: str) -> None:
    (copied / files.NAME).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ExportError, match="export again"):
        Trainer(copied, ort.schedule())


@pytest.mark.parametrize("found", [1, 2, "3", None])
def test_other_formats(copied: Path, values: Any, found: Any) -> None:
    (copied / files.NAME).write_text(json.dumps(values | {"format": found}))
    why = r" \(its gradients come from ONNX Runtime's own builder\)" if found == 1 else ""
    with pytest.raises(ExportError, match=rf"was written in format {found}{why}; this cpt_fx reads format 5: export"):
        Trainer(copied, ort.schedule())
