"""netem stands beside dpipe: it needs root and no torch, and dpipe does not know it
(test_architecture).
"""

import ast
import io
import tokenize
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).resolve().parent.parent.parent / "netem").glob("*.py"))
ALLOWED = {"dpipe.network.link", "dpipe.network.profile", "dpipe.errors"}


def num_tokens(text: str, function: ast.FunctionDef) -> int:
    """Names, operators and literals, as tests/test_architecture.py counts them in dpipe."""
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    lines = [
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in kinds
    ]
    return sum(function.lineno <= line <= function.end_lineno for line in lines)


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
    assert text.count("\n") <= 600
    assert max((num_tokens(text, f) for f in functions), default=0) <= 300
