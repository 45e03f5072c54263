"""The arrows point down: who may import whom, and what may be used where. DESIGN's drawing as a
dict.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GROUND = {"config", "parallelism", "presets", "topology", "streams", "errors"}
ALPHABETS = {"schedule", "wire"}
SPECIALISTS = {"timeline", "dataparallel", "transport", "stage", "coordinator"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "presets": set(),
    "parallelism": set(),
    "config": {"errors", "parallelism", "presets"},
    "topology": {"errors"},
    "streams": {"errors"},
    "schedule": {"errors", "topology"},
    "wire": {"errors"},
    **{room: (GROUND - {"config", "parallelism"}) | ALPHABETS for room in SPECIALISTS},
    "engine": GROUND | ALPHABETS | SPECIALISTS,
    "baselines": GROUND | ALPHABETS | SPECIALISTS | {"engine"},
    "cli": GROUND | ALPHABETS | SPECIALISTS | {"engine", "baselines"},
    "__init__": GROUND
    | {"schedule", "timeline"},  # for type checkers; else it imports what is asked for
    "__main__": {"cli"},
}
ONLY_IN: dict[str, tuple[str, ...]] = {
    "cupy": ("transport/nccl.py", "dataparallel/allreduce.py"),
    "grpc": (
        "wire/rpc.py",  # opens every server and channel of the rooms below, with token and TLS
        "transport/grpc.py",
        "paramserver/server.py",
        "paramserver/client.py",
        "coordinator/",
    ),
    "pickle": (),
    "netem": (),
}
WITHOUT_TORCH = (
    "config.py",
    "parallelism.py",
    "topology.py",
    "errors.py",
    "cli.py",
    "schedule/",
    "timeline/",
    "wire/format.py",
)
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_MEDIAN_FUNCTION_LINES = 420, 65, 10

SOURCES = sorted(p for p in (ROOT / "dpipe").rglob("*.py") if "v1" not in p.parts)
NAMES = [str(path.relative_to(ROOT / "dpipe")) for path in SOURCES]


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def room_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


@pytest.mark.parametrize("name", NAMES)
def test_room_imports_only_rooms_below_it(name: str) -> None:
    tree = ast.parse((ROOT / "dpipe" / name).read_text())
    rooms = {module.split(".")[1] for module in imports(tree) if module.startswith("dpipe.")} - {
        "__version__"
    }
    above = rooms - MAY_IMPORT[room_of(name)] - {room_of(name)}
    assert not above, f"{name} imports {sorted(above)}"


@pytest.mark.parametrize("name", NAMES)
def test_library_is_imported_only_where_it_belongs(name: str) -> None:
    tree = ast.parse((ROOT / "dpipe" / name).read_text())
    used = {module.split(".")[0] for module in imports(tree)}
    strangers = {
        lib
        for lib, places in ONLY_IN.items()
        if lib in used and not name.startswith(places or ("-",))
    }
    assert not strangers, f"{name} imports {sorted(strangers)}"


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(WITHOUT_TORCH)])
def test_room_needs_no_torch(name: str) -> None:
    tree = ast.parse((ROOT / "dpipe" / name).read_text())
    assert "torch" not in {module.split(".")[0] for module in imports(tree)}


# What gRPC is told by the environment alone, wire/rpc.py sets there.
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("run/launch.py", "wire/rpc.py")]
)
def test_environment_is_read_by_launch_alone(name: str) -> None:
    text = (ROOT / "dpipe" / name).read_text()
    assert "os.environ" not in text
    assert "getenv" not in text


@pytest.mark.parametrize("name", NAMES)
def test_file_and_functions_stay_small(name: str) -> None:
    text = (ROOT / "dpipe" / name).read_text()
    long = [(f, n) for f, n in functions(ast.parse(text)) if n > MAX_FUNCTION_LINES]
    assert text.count("\n") <= MAX_FILE_LINES
    assert not long


def test_median_function_is_short() -> None:
    lengths = sorted(n for path in SOURCES for _, n in functions(ast.parse(path.read_text())))
    assert lengths[len(lengths) // 2] <= MAX_MEDIAN_FUNCTION_LINES


def test_every_room_is_drawn() -> None:
    assert {room_of(name) for name in NAMES} <= set(MAY_IMPORT)
