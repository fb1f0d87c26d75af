"""What the documentation claims about the code is checked here."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import hymo
from hymo.cli import build_parser, split_overrides

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / "lab").glob("*.md"),
]


def test_configuration_page_is_what_the_types_say():
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs" / "make_configuration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text(encoding="utf-8")
    assert page.split(module.BEGIN)[1] == module.tables(), "run: python docs/make_configuration.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_architecture_page_names_every_source_file_and_no_other():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", page))
    files = {str(p.relative_to(ROOT / "src" / "hymo")) for p in (ROOT / "src" / "hymo").rglob("*.py")}
    assert named == {f for f in files if not f.endswith("__init__.py")} | {"__init__.py"}


def test_commands_of_the_readme_are_commands_and_the_essentials_come_first():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^(?:torchrun .* -m )?(hymo [^#\n]*)", page, flags=re.MULTILINE)
    assert len(lines) > 12
    for line in lines:
        plain, _ = split_overrides(shlex.split(line)[1:])
        build_parser().parse_args(plain)
    first = page.split("![")[0]  # what is to be read before the pictures
    assert len(first.splitlines()) <= 60
    for word in (
        "pip install",
        "hymo train",
        "data build",
        "report",
        "branch",
        "export",
        "from_pretrained",
        "generate",
    ):
        assert word in first


def test_extras_are_named_where_one_installs():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in ("README.md", "docs/quickstart.md"):
        install = (ROOT / page).read_text(encoding="utf-8").split("## Install")[1].split("\n## ")[0]
        assert all(f"`{extra}`" in install for extra in extras), page


def test_every_public_name_can_be_imported():
    for name in hymo.__all__:
        assert getattr(hymo, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        hymo.no_such_name  # noqa: B018


def test_nothing_names_a_machine_path_or_a_package_index():
    machine = re.compile(r"(^|[^a-zA-Z0-9_.])/(tmp|work|root|farm|home)/|index-url")
    for page in [*PAGES, *ROOT.glob("src/**/*.py"), *ROOT.glob("configs/*"), ROOT / "pyproject.toml"]:
        found = machine.search(page.read_text(encoding="utf-8"))
        assert not found, f"{page}: {found.group()}"
