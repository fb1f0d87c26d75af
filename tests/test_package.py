"""The package's public names: what a type checker sees is what an import gives."""

import ast
import importlib
from pathlib import Path

import hymo


def names_for_type_checkers():
    """(module, name) of the imports under TYPE_CHECKING."""
    tree = ast.parse(Path(hymo.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(block.body)
    return {(node.module, alias.asname or alias.name) for node in imports for alias in node.names}


def test_type_checkers_see_the_public_names():
    assert names_for_type_checkers() == {(module, name) for module, names in hymo._HOMES.items() for name in names}


def test_every_public_name_is_that_of_its_home():
    for module, names in hymo._HOMES.items():
        for name in names:
            assert getattr(hymo, name) is getattr(importlib.import_module(module), name)
