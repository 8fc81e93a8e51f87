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
from cpt_fx.export import manifest as files
from cpt_fx.ort import Trainer
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
    "text", ["", "{", "[]", "null", "7", '"format"', "{}", "[" * 100_000, '{"format": 2}', '{"format": NaN}', "\udcff"]
)
def test_what_is_no_manifest(copied: Path, text: str) -> None:
    (copied / files.NAME).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ExportError, match="export again"):
        Trainer(copied, ort.schedule())


@pytest.mark.parametrize("found", [1, 3, "2", None])
def test_other_formats(copied: Path, values: Any, found: Any) -> None:
    (copied / files.NAME).write_text(json.dumps(values | {"format": found}))
    why = r" \(its gradients come from ONNX Runtime's own builder\)" if found == 1 else ""
    with pytest.raises(ExportError, match=rf"was written in format {found}{why}, by cpt_fx .*reads format 2: export"):
        Trainer(copied, ort.schedule())


def changes(values: Any) -> dict[str, Any]:
    """Manifests in which every entry has the right type, and says something else than the graphs do."""
    (x,), (target,), (output,) = values["inputs"], values["targets"], values["outputs"]
    first, second, *parameters = values["parameters"]
    state, *states = values["states"]
    weight, activation, *_ = values["dials"].items()

    def named(one: Any, name: str) -> Any:
        return one | {"name": name}

    def of(item: Any, **changed: Any) -> Any:
        return item | {"tensor": item["tensor"] | changed}

    return {
        "an input's name": {"inputs": [named(x, "y")]},
        "names of input and target swapped": {"inputs": [named(x, "target")], "targets": [named(target, "x")]},
        "an input's type": {"inputs": [x | {"dtype": "float64"}]},
        "an input's size": {"inputs": [x | {"shape": ["batch", 5]}]},
        "an input with fewer dims": {"inputs": [x | {"shape": ["batch"]}]},
        "no inputs": {"inputs": []},
        "no targets": {"targets": []},
        "an output's name": {"outputs": [named(output, "scores")]},
        "an output's type": {"outputs": [output | {"dtype": "float16"}]},
        "no outputs": {"outputs": []},
        "a width's name": {"dials": {"bits.other": weight[1]} | dict([activation])},
        "no widths": {"dials": {}},
        "more seeds": {"seeds": values["seeds"] + 1},
        "no seeds": {"seeds": 0},
        "a parameter's name": {"parameters": [of(first, name="other"), second, *parameters]},
        "a parameter's size": {"parameters": [of(first, shape=[3, 3]), second, *parameters]},
        "a parameter's type": {"parameters": [of(first, dtype="float64"), second, *parameters]},
        "names of parameters swapped": {
            "parameters": [
                of(first, name=second["tensor"]["name"]), of(second, name=first["tensor"]["name"]), *parameters
            ]
        },
        "a parameter less": {"parameters": [second, *parameters]},
        "a parameter that is not trained": {"parameters": [first | {"trainable": False}, second, *parameters]},
        "a parameter of no type": {"parameters": [of(first, dtype="other"), second, *parameters]},
        "a parameter of no size": {"parameters": [of(first, shape=[-1, 6]), second, *parameters]},
        "a state's name": {"states": [of(state, name="other"), *states]},
        "a state's type": {"states": [of(state, dtype="float64"), *states]},
        "a state less": {"states": states},
        "a learning rate more": {"optimizer": values["optimizer"] | {"learning_rates": [0.1, 0.1]}},
        "no learning rates": {"optimizer": values["optimizer"] | {"learning_rates": []}},
        "something remembered that varies": {
            "optimizer": values["optimizer"]
            | {"remembered": [{"tensor": x | {"name": "other"}, "next": "", "swaps": False}]}
        },
        "something remembered": {
            "optimizer": values["optimizer"] | {"remembered": [{"tensor": first["tensor"], "next": "", "swaps": False}]}
        },
    }  # fmt: skip


def test_a_manifest_of_other_graphs(copied: Path, values: Any) -> None:
    """Also where the digest was made to fit."""
    for what, changed in changes(values).items():
        made = {name: value for name, value in (values | changed).items() if name != "digest"}
        (copied / files.NAME).write_text(json.dumps(made | {"digest": files.digest_of(made)}))
        with pytest.raises(ExportError, match="export again"):
            Trainer(copied, ort.schedule(), threads=1)
            pytest.fail(f"accepted: {what}")
