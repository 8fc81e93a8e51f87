"""Graph files in the three formats in which they are published: tables of Cora, Planetoid, Open Graph Benchmark.

Planetoid's files are pickles. They are read by an unpickler that builds numpy arrays, sparse matrices, lists and
dictionaries, and refuses everything else: nothing in such a file can call a function.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

Split = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class RawGraph:
    """The content of the files: edges in their stored direction, and a split if there is one."""

    name: str
    features: Tensor
    edges: Tensor
    labels: Tensor
    split: Split | None

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.labels)


def read(folder: Path) -> RawGraph:
    """Return the graph in a folder, in any of the three formats."""
    if tables := sorted(folder.glob("*.content")):
        return _tables(tables[0])
    if parts := sorted(folder.glob("ind.*.x")):
        return _planetoid(folder, parts[0].name.split(".")[1])
    if (folder / "raw" / "edge.csv.gz").exists():
        return _open_graph_benchmark(folder)
    raise FileNotFoundError(
        f"{folder} holds no graph in a form that is known. Put there: cora.content and cora.cites; or Planetoid's "
        "ind.<name>.x, .y, .tx, .ty, .allx, .ally, .graph, .test.index; or a folder of the Open Graph Benchmark with "
        "raw/edge.csv.gz, raw/node-feat.csv.gz, raw/node-label.csv.gz and split/"
    )


def _tables(content: Path) -> RawGraph:
    """Read `<name>.content` (id, words, class in each line) and `<name>.cites` (cited, citing)."""
    cites = content.with_suffix(".cites")
    if not cites.exists():
        raise FileNotFoundError(f"{cites} is missing: it holds the edges of {content.name}")
    rows = [line.split() for line in content.read_text(encoding="utf-8").splitlines() if line.strip()]
    place = {row[0]: index for index, row in enumerate(rows)}
    kinds = {kind: index for index, kind in enumerate(sorted({row[-1] for row in rows}))}
    pairs = [line.split() for line in cites.read_text(encoding="utf-8").splitlines() if line.strip()]
    unknown = sum(name not in place for pair in pairs for name in pair)
    if unknown:
        raise ValueError(f"{cites} names {unknown} papers that {content.name} does not have: fetch both files anew")
    cited, citing = zip(*((place[cited], place[citing]) for cited, citing in pairs), strict=True)
    words = torch.from_numpy(np.array([row[1:-1] for row in rows], dtype=np.float32))
    labels = torch.tensor([kinds[row[-1]] for row in rows])
    return RawGraph(content.stem, _shares(words), torch.tensor([citing, cited]), labels, None)


def _planetoid(folder: Path, name: str) -> RawGraph:
    """Read the eight files of Planetoid: the last nodes are the test nodes, stored in another order."""
    x, tx, allx = (_matrix(folder / f"ind.{name}.{part}") for part in ("x", "tx", "allx"))
    ty, ally = (np.asarray(_unpickled(folder / f"ind.{name}.{part}")) for part in ("ty", "ally"))
    graph = _unpickled(folder / f"ind.{name}.graph")
    lines = _present(folder / f"ind.{name}.test.index").read_text(encoding="utf-8").split()
    test = np.array(lines, dtype=np.int64)
    nodes = max(len(graph), int(test.max()) + 1)
    # Some test nodes are in no file (15 in Citeseer): they are isolated and have no features.
    features = np.zeros((nodes, allx.shape[1]), dtype=np.float32)
    labels = np.zeros((nodes, ally.shape[1]), dtype=np.float32)
    features[: len(allx)], labels[: len(ally)] = allx, ally
    features[test], labels[test] = tx, ty
    edges = [(source, target) for source, targets in graph.items() for target in targets]
    train = torch.arange(len(x))
    split = (train, torch.arange(len(x), len(x) + 500), torch.from_numpy(np.sort(test)))
    kinds = torch.from_numpy(labels.argmax(axis=1))
    return RawGraph(name, _shares(torch.from_numpy(features)), torch.tensor(edges).t(), kinds, split)


def _open_graph_benchmark(folder: Path) -> RawGraph:
    """Read the tables of one graph of the Open Graph Benchmark, and its split (there is one, whatever its name)."""
    raw = folder / "raw"
    edges = _table(raw / "edge.csv.gz", np.int64)
    features = _table(raw / "node-feat.csv.gz", np.float32)
    labels = _table(raw / "node-label.csv.gz", np.int64)
    splits = sorted(path.parent for path in folder.glob("split/*/train.csv.gz"))
    if len(splits) != 1:
        raise FileNotFoundError(f"{folder / 'split'} must hold one folder with train.csv.gz, it holds {len(splits)}")
    train, valid, test = (
        torch.from_numpy(_table(splits[0] / f"{part}.csv.gz", np.int64)[:, 0]) for part in ("train", "valid", "test")
    )
    if len(labels) != len(features):
        raise ValueError(f"{raw} has {len(features)} rows of features and {len(labels)} labels: unpack it anew")
    return RawGraph(
        f"ogbn-{folder.name}",
        torch.from_numpy(features),
        torch.from_numpy(edges).t().contiguous(),
        torch.from_numpy(labels[:, 0]),
        (train, valid, test),
    )


def _table(path: Path, dtype: Any) -> np.ndarray:
    return np.loadtxt(_present(path), delimiter=",", dtype=dtype, ndmin=2)


def _shares(words: Tensor) -> Tensor:
    """Divide each row by its sum, as is usual for bags of words."""
    return words / words.sum(dim=1, keepdim=True).clamp(min=1e-12)


def _present(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the other files of this graph are there, fetch this one too")
    return path


class _SparseRows:
    """A substitute for scipy's sparse matrix while its arrays are read."""

    data: np.ndarray
    indices: np.ndarray
    indptr: np.ndarray
    _shape: tuple[int, int]

    def dense(self) -> np.ndarray:
        """Return the whole matrix."""
        result = np.zeros(self._shape, dtype=np.float32)
        rows = np.repeat(np.arange(self._shape[0]), np.diff(self.indptr))
        result[rows, self.indices] = self.data
        return result


class _Unpickler(pickle.Unpickler):
    """Builds arrays, sparse matrices, lists and dictionaries, under the names that Python 2 gave them."""

    _admitted: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("scipy.sparse.csr", "csr_matrix"): _SparseRows,
        ("collections", "defaultdict"): defaultdict,
        ("__builtin__", "list"): list,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the class that a name in the file stands for."""
        if (module, name) not in self._admitted:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no file of Planetoid needs")
        return self._admitted[module, name]


def _unpickled(path: Path) -> Any:
    with _present(path).open("rb") as file:
        try:
            return _Unpickler(file, encoding="latin1").load()
        except Exception as error:
            raise ValueError(f"{path} is no file of Planetoid: {error}") from error


def _matrix(path: Path) -> np.ndarray:
    value = _unpickled(path)
    return value.dense() if isinstance(value, _SparseRows) else np.asarray(value, dtype=np.float32)
