"""A study as its store holds it: the records, and the reports that are made of them."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from cpt_fx.errors import nearest
from cpt_fx.study import store as stores
from cpt_fx.study.records import Record
from cpt_fx.study.store import Found


@dataclass(frozen=True)
class Study:
    """What is in a store, read anew each time: a study that is still running may be looked at."""

    store: Path
    name: str | None = None
    """None: all studies of the store."""

    @property
    def cells(self) -> list[Found]:
        """What the study consists of, each with its record where it was trained."""
        with stores.reading(self.store) as kept:
            return kept.cells(self.name)

    @property
    def records(self) -> list[Record]:
        """All cells that were trained, finished and failed."""
        return [cell.record for cell in self.cells if cell.record is not None]

    @property
    def failed(self) -> list[Record]:
        """The cells that failed; `error` of each says why."""
        return [record for record in self.records if record.status == "failed"]

    def write(
        self,
        folder: str | PathLike[str],
        *,
        title: str | None = None,
        notes: str | None = None,
        command: str | None = None,
    ) -> dict[str, Path]:
        """Write tables and figures: CSV, Markdown, PNG, SVG and one page of HTML; returns the files by what they are.

        ``notes`` say what the data are and what they cannot show, ``command`` what regenerates the report.
        """
        from cpt_fx.study.writing import write  # keeps matplotlib and the page's parts out of a study that only runs

        return write(self.records, folder, title=title, notes=notes, command=command)


def load(store: str | PathLike[str], name: str | None = None) -> Study:
    """Return a study that was run, or is running; without a name, all that the store holds."""
    path = Path(store)
    with stores.reading(path) as kept:
        names = kept.studies()
    if name is not None and name not in names:
        listed = ", ".join(repr(one) for one in names) or "none"
        raise ValueError(f"the store {path} has no study {name!r}; it has {listed}.{nearest(name, names)}")
    return Study(path, name)
