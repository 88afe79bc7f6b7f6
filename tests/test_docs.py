"""The documentation agrees with itself and with the code: links, the README, the list of commands."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from node.cli import app
from optim.compose import REGISTRY
from optim.recipes import RECIPES
from protocol.manifest.reading import load_manifest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
MAX_README_WORDS, MAX_README_ROWS = 1200, 8


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if ":" in path:
            continue
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_a_page_names_exist(page: Path) -> None:
    folders = "protocol|optim|node|tests|benchmarks|docker|configs|docs"
    named = re.findall(rf"`(?:python )?((?:{folders})/[\w./-]*)[` ]", page.read_text())
    assert not [path for path in named if not (ROOT / path).exists()]


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= MAX_README_WORDS
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert tables and all(table.count("\n") - 2 <= MAX_README_ROWS for table in tables)


def test_manifest_in_the_readme_is_valid(tmp_path: Path) -> None:
    examples = re.findall(r"```toml\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(examples) == 1
    (tmp_path / "run.toml").write_text(examples[0])
    assert load_manifest(tmp_path / "run.toml").method.recipe == "frugal"


def test_reference_names_every_command_and_no_other() -> None:
    text = (ROOT / "docs" / "reference" / "commands.md").read_text()
    group = typer.main.get_group(app)
    assert set(re.findall(r"^\| `murmur (\w+)", text, re.MULTILINE)) == set(group.commands)


FLAG = re.compile(r"--[a-z][a-z0-9-]*")
NEGATIVE = "--no-"
DOCUMENTED = ("docs/user/*.md", "docs/reference/*.md", "README.md")


def flags_of(command: Any) -> set[str]:
    """Return the long flags of a command; `--no-x` is explained with `--x`."""
    flags = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return {name for name in flags if FLAG.fullmatch(name) and name != "--help" and not name.startswith(NEGATIVE)}


def flags_named_in(*patterns: str) -> set[str]:
    return {flag for pattern in patterns for path in ROOT.glob(pattern) for flag in FLAG.findall(path.read_text())}


@pytest.mark.parametrize(("command", "page"), [("join", "docs/user/join.md"), ("host", "docs/user/host.md")])
def test_page_of_a_command_names_each_of_its_flags(command: str, page: str) -> None:
    assert flags_of(typer.main.get_group(app).commands[command]) - flags_named_in(page) == set()


def test_pages_for_users_name_every_flag() -> None:
    flags = {flag for command in typer.main.get_group(app).commands.values() for flag in flags_of(command)}
    assert len(flags) > 60
    assert flags - flags_named_in(*DOCUMENTED) == set()


def test_tables_of_flags_name_no_other() -> None:
    flags = {flag for command in typer.main.get_group(app).commands.values() for flag in flags_of(command)}
    pages = ("docs/user/join.md", "docs/user/host.md", "docs/reference/commands.md")
    rows = (row for page in pages for row in re.findall(r"^\| (`--.*?) \|", (ROOT / page).read_text(), re.MULTILINE))
    named = {flag for row in rows for flag in FLAG.findall(row)}
    assert len(named) > 30
    assert {flag for flag in named if not flag.startswith(NEGATIVE)} - flags == set()


def test_references_name_every_recipe_and_every_kind_of_part() -> None:
    recipes = (ROOT / "docs" / "reference" / "recipes.md").read_text()
    rows = re.findall(r"^\| (`[a-z0-9-]+`(?:, `[a-z0-9-]+`)*) \| (?:ours|\d{4}\.)", recipes, re.MULTILINE)
    assert sorted(name.strip("`") for row in rows for name in row.split(", ")) == sorted(RECIPES)
    assert f"**{len(RECIPES)} methods**" in (ROOT / "README.md").read_text()
    manifest = (ROOT / "docs" / "reference" / "manifest.md").read_text()
    kinds = manifest.split("| part | kinds |")[1].split("\n\n")[0]
    for part, known in REGISTRY.items():
        row = re.search(rf"^\| {part} \| (.+) \|$", kinds, re.MULTILINE)
        assert row and sorted(re.findall(r"`([\w-]+)`", row[1])) == sorted(known)


def test_modules_and_tests_that_pages_name_exist() -> None:
    roots = ("", "node", "protocol")  # ARCHITECTURE.md leaves out the package where it is clear
    for page in (ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"):
        named = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|md|proto|toml))`", page.read_text()))
        assert named
        missing = [path for path in named if not any((ROOT / root / path).exists() for root in roots)]
        assert not missing, (page.name, missing)


def test_architecture_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().split()) <= 2_300
