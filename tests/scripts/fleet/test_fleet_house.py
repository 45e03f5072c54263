"""fleet stands beside dpipe: no torch on the user's side, nothing but the standard library on the
machines'.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support.tokens import lines_of_tokens

FLEET = Path(__file__).resolve().parents[3] / "scripts/fleet"
SOURCES = sorted(FLEET.glob("*.py"))


def num_tokens(text: str, function: ast.FunctionDef) -> int:
    """Names, operators and literals, as tests/test_architecture.py counts them in dpipe."""
    lines, _ = lines_of_tokens(text)
    return sum(function.lineno <= line <= function.end_lineno for line in lines)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_fleet_stays_small(path):
    text = path.read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert text.count("\n") <= 600
    assert max((num_tokens(text, f) for f in functions), default=0) <= 300


def test_agent_needs_the_standard_library_alone():
    nodes = list(ast.walk(ast.parse((FLEET / "agent.py").read_text())))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names


def test_fleet_needs_no_torch():
    code = "import fleet.cluster, fleet.aws, sys; sys.exit('torch' in sys.modules)"
    environ = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environ, timeout=60).returncode == 0
