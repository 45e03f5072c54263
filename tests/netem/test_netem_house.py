"""netem stands beside dpipe: it needs root and no torch, and dpipe does not know it
(test_architecture).
"""

import ast
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).resolve().parent.parent.parent / "netem").glob("*.py"))
ALLOWED = {"dpipe.network.link", "dpipe.machines.hosts", "dpipe.errors"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_netem_imports_only_networks_and_errors_of_dpipe(path):
    tree = ast.parse(path.read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert {
        module for module in modules if module and module.startswith(("dpipe", "torch"))
    } <= ALLOWED
