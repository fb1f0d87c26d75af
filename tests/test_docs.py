"""What the documentation claims about the code is checked here."""

import importlib.util
import re
from pathlib import Path

import pytest

import hymo

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
