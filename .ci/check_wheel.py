"""Run by an interpreter that has the built wheel and no checkout: is all of the package there, and from there?"""

import importlib
import importlib.metadata
import sys
from pathlib import Path

# What these import comes with extras, which exclude each other: such a module is only looked for.
BEHIND_EXTRAS = ("cpt_fx.export", "cpt_fx.ort")


def main(root: Path) -> None:
    """Import every module of the checkout at `root` from the installed package."""
    package = [path.relative_to(root) for path in (root / "cpt_fx").rglob("*.py") if "passes" not in path.parts]
    passes = [Path("cpt_fx") / path.relative_to(root) for path in (root / "passes").rglob("*.py")]
    for path in sorted({*package, *passes}):
        if path.name == "__main__.py":
            continue
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        try:
            file = importlib.import_module(name).__file__
        except ImportError:
            if not name.startswith(BEHIND_EXTRAS):
                raise
            file = str(Path(sys.modules["cpt_fx"].__file__ or "").parents[1] / path)
            file = file if Path(file).is_file() else None
        if file is None or not Path(file).is_relative_to(sys.prefix):
            raise SystemExit(f"{name} was imported from {file}, not from the wheel in {sys.prefix}")
    if not (Path(sys.modules["cpt_fx"].__file__ or "").parent / "py.typed").is_file():
        raise SystemExit("the wheel has no py.typed")
    version = importlib.metadata.version("cpt_fx")
    print(f"{len(package) + len(passes)} modules of cpt_fx {version} imported from the wheel")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
