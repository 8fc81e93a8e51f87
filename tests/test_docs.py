"""The documents hold: every Python block runs, every command exists, every relative link leads somewhere."""

import re
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cpt_fx import cli

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
COMMANDS = (
    'pip install -c constraints.txt ".[demo]" && cpt-fx demo',
    'pip install -c constraints.txt -e ".[dev]" && pytest',
)
# Every block says what it is. "python" is run, always: there is no word that stops it.
LANGUAGES = {"bash", "json", "mermaid", "python", "text", "toml", "yaml"}
# What blocks of a document need that the default environment has not: .ci/export runs these.
NEEDS = {"docs/export.md": ("onnxscript", "onnxruntime")}

FENCE = re.compile(r"^(?P<indent>[ >]*)(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)$")
LINK = re.compile(r"""\]\(\s*<?([^)\s>]+)|^\s*\[[^\]]+\]:\s+(\S+)|(?:src|href)=["']([^"']+)["']""", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of the opening fence, counted from 1."""

    info: str
    line: int
    code: str


def closes(line: str, opening: re.Match[str]) -> bool:
    fence = FENCE.match(line)
    return fence is not None and not fence["info"].strip() and fence["ticks"].startswith(opening["ticks"])


def parse(text: str) -> tuple[list[Block], str]:
    """The fenced blocks of a document, and the document without them (line numbers kept)."""
    blocks: list[Block] = []
    prose: list[str] = []
    opening: re.Match[str] | None = None
    start, body = 0, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if opening is None and fence is not None:
            opening, start, body = fence, number, []
        elif opening is not None and closes(line, opening):
            blocks.append(Block(opening["info"].strip(), start, textwrap.dedent("\n".join(body) + "\n")))
            opening = None
        elif opening is not None:
            body.append(line)
        prose.append(line if opening is None and fence is None else "")
    if opening is not None:
        raise ValueError(f"the block opened in line {start} is never closed")
    return blocks, "\n".join(prose)


def executed() -> list[Path]:
    """The documents whose blocks run; decisions are history and may speak of code that is gone."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    return [README, *(path for path in docs if (ROOT / "docs" / "decisions") not in path.parents)]


def documents() -> list[Path]:
    below = [path for folder in ("docs", "examples", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *below])


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_blocks(path: Path, title: str) -> int:
    """Runs a document's Python blocks in one namespace, line numbers those of the document; returns how many."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    blocks = [block for block in parse(path.read_text(encoding="utf-8"))[0] if block.info == "python"]
    for block in blocks:
        try:
            exec(compile("\n" * block.line + block.code, str(path), "exec", dont_inherit=True), namespace)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{title}, block at line {block.line}: {type(error).__name__}: {error}") from error
    return len(blocks)


def slugs(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,6}\s+(.+?)\s*#*$", parse(path.read_text(encoding="utf-8"))[1], flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    earlier = [plain[:index].count(slug) for index, slug in enumerate(plain)]
    return {f"{slug}-{count}" if count else slug for slug, count in zip(plain, earlier, strict=True)}


def broken_links(path: Path, root: Path) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", parse(path.read_text(encoding="utf-8"))[1])
    broken = []
    for target in (next(filter(None, found)) for found in LINK.findall(prose)):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        file, _, anchor = target.partition("#")
        goal = (path.parent / file).resolve() if file else path
        outside = root.resolve() not in [goal, *goal.parents]
        if outside or not goal.exists() or (anchor and goal.suffix == ".md" and anchor not in slugs(goal)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("path", executed(), ids=name)
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in NEEDS.get(name(path), ()):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    run_blocks(path, name(path))


@pytest.mark.parametrize("path", documents(), ids=name)
def test_every_block_names_its_language(path: Path) -> None:
    blocks, _ = parse(path.read_text(encoding="utf-8"))
    assert [f"line {block.line}: {block.info!r}" for block in blocks if block.info not in LANGUAGES] == []


def shell_lines(path: Path) -> list[str]:
    blocks, _ = parse(path.read_text(encoding="utf-8"))
    text = "".join(block.code for block in blocks if block.info == "bash").replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def test_readme_gives_exactly_two_commands() -> None:
    others = [line for line in shell_lines(README) if not line.startswith("cpt-fx ")]
    assert others == list(COMMANDS)


@pytest.mark.parametrize("path", executed(), ids=name)
def test_commands_exist(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `cpt-fx <subcommand> --option ...` in a document is known to that subcommand's help."""
    monkeypatch.setenv("COLUMNS", "200")
    for line in shell_lines(path):
        for command in re.findall(r"cpt-fx [^&|;>]*", line):
            _, *words = shlex.split(command, comments=True)
            # `cpt-fx export onnx`: a subcommand may have its own.
            nested = words[:1] in (["export"], ["study"])
            subcommand = [word for word in words[: 1 + nested] if not word.startswith("-")]
            monkeypatch.setattr(sys, "argv", ["cpt-fx", *subcommand, "--help"])
            with pytest.raises(SystemExit) as stop:
                cli.main()
            assert stop.value.code in (0, None), command
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            shown = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
            assert options - shown == set(), command


@pytest.mark.parametrize("path", documents(), ids=name)
def test_scripts_exist(path: Path) -> None:
    """Every `python benchmarks/...` in a document, and its options, are known to that script."""
    for line in re.findall(r"python (benchmarks/[^`|;>\n]*)", path.read_text(encoding="utf-8")):
        script, *words = shlex.split(line, comments=True)
        known = (ROOT / script).read_text(encoding="utf-8") + '"--help"'
        assert [word for word in words if word.startswith("--") and f'"{word}"' not in known] == [], line


@pytest.mark.parametrize("path", documents(), ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path, ROOT) == []


def test_a_failing_block_is_named(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# A\n\n```python\nx = 1\n```\n\n```text\nnot python\n```\n\n```python\nassert x == 2, 'no'\n```\n")
    with pytest.raises(AssertionError, match=r"page, block at line 11: AssertionError: no"):
        run_blocks(path, "page")


def test_an_indented_block_is_found() -> None:
    (block,), prose = parse("1. do\n\n   ```python\n   if x:\n       y\n   ```\n2. then [a](b)\n")
    assert (block.info, block.line, block.code) == ("python", 3, "if x:\n    y\n")
    assert prose.splitlines()[-1] == "2. then [a](b)"


def test_an_open_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 2 is never closed"):
        parse("a\n```python\n1\n")


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    good = "[a](#one-thing) [d](page.md) [f](https://f) `[h](h.md)`"
    path.write_text(f"# One thing\n\n{good}\n[b](#two) ![c](c.png) <img src='e.svg'> [g](/)\n")
    assert broken_links(path, tmp_path) == ["#two", "c.png", "e.svg", "/"]
