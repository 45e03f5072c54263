"""netem stands beside dpipe: it needs root and no torch, and dpipe does not know it
(test_architecture).
"""

import ast
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).resolve().parent.parent.parent / "netem").glob("*.py"))
ALLOWED = {"dpipe.network.link", "dpipe.network.profile", "dpipe.errors"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_netem_knows_the_ground_of_dpipe_alone(path):
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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_netem_stays_small(path):
    text = path.read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert text.count("\n") <= 400
    assert all((f.end_lineno or 0) - f.lineno < 60 for f in functions)
