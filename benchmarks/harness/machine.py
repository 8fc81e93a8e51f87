"""The origin of a measurement: processor, versions, date and command. Every result includes it."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from cpt_fx.study.training import processor, versions

PACKAGES = ("cpt_fx", "torch", "transformers", "torchao", "brevitas")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where, with what, when and how something was measured."""

    processor: str
    cores: int
    threads: int
    versions: dict[str, str]
    date: str
    command: str

    @property
    def place(self) -> str:
        """Everything but the command, in one line."""
        cores = f"{self.cores} core{'s' * (self.cores != 1)}"
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"{self.processor}, {cores}, {threads}. {versions}. {self.date}"

    def __str__(self) -> str:
        """Return everything in one line."""
        return f"{self.place}. {self.command}"

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)


def here(threads: int, command: str | None = None) -> Machine:
    """Describe this machine, now. Without a command, it is the one that started this process."""
    return Machine(
        processor=processor(),
        cores=os.cpu_count() or 1,
        threads=threads,
        versions=versions(PACKAGES),
        date=datetime.now(timezone.utc).date().isoformat(),
        command=command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    )
