"""Imports point down: which room may import which, and which library is used where. The drawing of
the rooms as a dict.
"""

import ast
import re
import shutil
import subprocess
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.tokens import lines_of_tokens

pytestmark = pytest.mark.slow  # scripts/check runs all of these
ROOT = Path(__file__).resolve().parent.parent
GROUND = {"choices", "disk", "errors", "ranks", "streams", "toml"}
ALPHABETS = {"machines", "network", "schedule", "wire"}
SPECIALISTS = {
    "timeline",
    "passes",
    "stage",
    "transport",
    "coordinator",
    "optimizers",
    "dataparallel",
    "paramserver",
    "paramworker",
    "elastic",
    "relay",
    "trackers",
}
BELOW_CONFIG = GROUND | ALPHABETS
BELOW_MEETING = BELOW_CONFIG | {"config"} | SPECIALISTS
BELOW_TRAINING = BELOW_MEETING | {
    "data",
    "export",
    "hub",
    "store",
    "tokenizer",
    "probe",
    "plan",
    "placement",
    "planner",
    "report",
}

MAY_IMPORT: dict[str, set[str]] = {
    "disk": set(),
    "errors": set(),
    "ranks": set(),
    "toml": set(),
    "choices": {"errors"},
    "streams": {"errors"},
    "network": {"errors", "toml"},
    "machines": {"errors", "network", "toml"},
    "schedule": {"choices", "errors"},
    "wire": {"choices", "errors", "streams"},
    **dict.fromkeys(SPECIALISTS, BELOW_CONFIG),
    "stage": BELOW_CONFIG | {"passes"},
    "session": {"errors", "wire"},
    "relay": {"errors", "session", "wire"},
    "trackers": {"choices", "errors", "timeline"},
    "coordinator": BELOW_CONFIG | {"relay", "session"},
    "transport": BELOW_CONFIG | {"session"},
    "dataparallel": BELOW_CONFIG | {"optimizers"},
    "paramserver": BELOW_CONFIG | {"dataparallel", "optimizers"},  # it steps as a rank would
    "paramworker": BELOW_CONFIG | {"dataparallel", "paramserver"},  # one more kind
    "convert": BELOW_CONFIG | {"config"},
    "search": BELOW_CONFIG | {"timeline"},
    "config": BELOW_CONFIG | SPECIALISTS,  # of them it reads the tables of choices, without torch
    "store": BELOW_MEETING,
    "quantised": set(),
    "hub": BELOW_MEETING | {"quantised", "store"},
    "terms": BELOW_MEETING | {"store"},
    "export": BELOW_MEETING | {"hub", "store"},
    "tokenizer": BELOW_MEETING | {"hub"},
    "data": BELOW_MEETING | {"hub", "tokenizer"},
    "memory": BELOW_MEETING | {"tokenizer"},
    "probe": BELOW_MEETING | {"memory"},
    "plan": BELOW_MEETING | {"data", "hub", "store", "memory", "probe", "search", "tokenizer"},
    "placement": BELOW_MEETING | {"data", "memory", "plan", "search"},
    "planner": BELOW_MEETING | {"data", "memory", "placement", "plan", "search"},
    "report": BELOW_MEETING | {"data", "store", "plan"},
    "measure": BELOW_MEETING | {"session", "plan", "probe", "tokenizer"},
    "engine": BELOW_MEETING | {"data", "store", "report"},
    "keeper": BELOW_CONFIG | {"session", "stage", "store", "transport"},
    "processes": {"errors", "report", "wire"},
    "run": BELOW_TRAINING | {"engine", "measure", "processes"},
    "epoch": BELOW_TRAINING | {"engine", "memory", "keeper", "processes", "run"},
    "agent": BELOW_TRAINING | {"epoch", "memory", "keeper", "processes", "run", "terms"},
    "serve": BELOW_TRAINING | {"agent", "processes", "run"},
    "supervisor": BELOW_TRAINING | {"agent", "epoch", "processes", "run"},
    "watch": BELOW_TRAINING | {"memory", "agent"},  # it asks a coordinator as `dpipe status` does
    "baselines": BELOW_TRAINING | {"engine", "processes", "run"},
    "bench": BELOW_TRAINING | {"engine", "processes", "run", "baselines"},
    "cli": BELOW_TRAINING
    | {"agent", "bench", "convert", "engine", "measure", "processes", "run", "serve"}
    | {"supervisor", "watch"},
    "__init__": BELOW_CONFIG | {"config", "timeline", "run"},  # for type checkers: it is lazy
    "__main__": {"cli"},
}
ONLY_IN: dict[str, tuple[str, ...]] = {
    "cupy": ("transport/nccl.py",),
    "grpc": (
        "wire/rpc.py",  # opens every server and channel of the rooms below, with token and TLS
        "session/grpc_stream.py",
        "relay/server.py",
        "relay/ends.py",
        "transport/grpc.py",
        "paramserver/server.py",
        "paramworker/client.py",
        "coordinator/",
        "agent/server.py",
        "agent/methods.py",
        "agent/control_stream.py",
    ),
    "pickle": (),
    "netem": (),
}
WITHOUT_TORCH = (
    "choices.py",
    "config/",
    "convert/",
    "dataparallel/kinds.py",
    "elastic/",
    "errors.py",
    "machines/",
    "memory/",
    "network/",
    "ranks.py",
    "toml.py",
    "stage/families.py",
    "transport/kinds.py",
    "optimizers/kinds.py",
    "trackers/kinds.py",
    "cli/",
    "schedule/",
    "search/",
    "timeline/",
    "wire/format.py",
)
MAX_ROOM_LINES, MAX_FILE_LINES, MAX_FUNCTION_TOKENS = 2500, 600, 300
MAX_TOKENS_A_LINE, MIN_COMMENTS_PER_100_LINES = 8.0, 6
# Rooms whose statements have not been simplified yet: they may only get thinner.
STILL_DENSE = {
    "bench": 8.25,
    "data": 8.2,
    "dataparallel": 8.2,
    "engine": 8.15,
    "memory": 8.1,
    "paramserver": 8.2,
    "paramworker": 8.15,
    "schedule": 8.05,
    "stage": 8.1,
    "timeline": 8.15,
}

# Tools beside dpipe, with the same limits for files and lines.
TOOLS = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ("netem", "scripts")}

SOURCES = sorted(p for p in (ROOT / "dpipe").rglob("*.py") if "v1" not in p.parts)
ALL_SOURCES = [*SOURCES, *TOOLS["netem"], *TOOLS["scripts"]]
NAMES = [str(path.relative_to(ROOT / "dpipe")) for path in SOURCES]


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / "dpipe" / name).read_text())


@cache
def imports_of(name: str) -> set[str]:
    return set(imports(tree_of(name)))


def libraries_of(name: str) -> set[str]:
    return {module.split(".")[0] for module in imports_of(name)}


@cache
def room_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def module_of(name: str) -> str:
    return "dpipe." + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


MODULES = {module_of(name): name for name in NAMES}
ROOMS = sorted({str(Path(name).parent) for name in NAMES} - {"."})


def test_rooms_import_only_rooms_below_them() -> None:
    above = set()
    for name in NAMES:
        rooms = {module.split(".")[1] for module in imports_of(name) if module.startswith("dpipe.")}
        allowed = MAY_IMPORT[room_of(name)] | {room_of(name), "__version__"}
        above |= {f"{name} imports {room}" for room in rooms - allowed}
    assert not above


def test_files_import_each_other_one_way_only() -> None:
    """Files are removed from the bottom up; a cycle, and what imports it, remains."""
    arrows = {}
    for module, name in MODULES.items():
        arrows[module] = (imports_of(name) & set(MODULES)) - {module, "dpipe"}
    while lowest := {module for module, targets in arrows.items() if not targets & set(arrows)}:
        arrows = {module: targets for module, targets in arrows.items() if module not in lowest}
    assert not arrows, f"a circle of imports is among {sorted(arrows)}"


@pytest.mark.parametrize("library", ONLY_IN)
def test_library_is_imported_only_where_it_belongs(library: str) -> None:
    places = ONLY_IN[library]
    elsewhere = [name for name in NAMES if not name.startswith(places or ("-",))]
    assert not [name for name in elsewhere if library in libraries_of(name)]


def test_rooms_that_need_no_torch_import_none() -> None:
    assert not [
        name for name in NAMES if name.startswith(WITHOUT_TORCH) and "torch" in libraries_of(name)
    ]


@pytest.mark.parametrize("reading", ["os.environ", "getenv"])
def test_environment_is_read_in_one_file(reading: str) -> None:
    readers = [name for name in NAMES if reading in (ROOT / "dpipe" / name).read_text()]
    assert set(readers) <= {"processes/environment.py"}


def test_no_import_changes_the_environment() -> None:
    modules = [module for module in MODULES if module != "dpipe.__main__"]
    code = (
        "import importlib, os\n"
        "import torch.distributed.pipelining\n"  # which sets torch's own TORCHINDUCTOR_CACHE_DIR
        "before = dict(os.environ)\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


def long_functions(text: str) -> dict[str, int]:
    """Functions of more than the allowed tokens, with their number."""
    lines, _ = lines_of_tokens(text)
    counts = {}
    for function in functions(ast.parse(text)):
        behind = bisect_right(lines, function.end_lineno or 0)
        counts[function.name] = behind - bisect_left(lines, function.lineno)
    return {name: count for name, count in counts.items() if count > MAX_FUNCTION_TOKENS}


@cache
def plain_layout() -> dict[Path, str]:
    """By file, its text with every line as long as it may be: a call is not broken over lines for
    its trailing comma alone, which would thin out the lines and leave the statement as it is.
    """
    plain = {}
    with TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copy(ROOT / "pyproject.toml", copy)
        for path in ALL_SOURCES:
            place = copy / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
        layout = ("--no-cache", "--config", "format.skip-magic-trailing-comma=true")
        command = [sys.executable, "-m", "ruff", "format", "--quiet", *layout, folder]
        subprocess.run(command, check=True, timeout=90)
        for path in copy.rglob("*.py"):
            plain[ROOT / path.relative_to(copy)] = path.read_text()
    return plain


def tokens_a_line(files: list[Path]) -> float:
    lines = [lines_of_tokens(plain_layout()[path])[0] for path in files]
    return sum(map(len, lines)) / sum(len(set(one)) for one in lines)


def test_files_stay_small() -> None:
    lengths = {str(path): path.read_text().count("\n") for path in ALL_SOURCES}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}


def test_functions_stay_small() -> None:
    long = {str(path): long_functions(path.read_text()) for path in ALL_SOURCES}
    assert not {path: counts for path, counts in long.items() if counts}


@pytest.mark.parametrize("folder", TOOLS)
def test_lines_of_a_tool_have_air(folder: str) -> None:
    assert tokens_a_line(TOOLS[folder]) <= MAX_TOKENS_A_LINE


@pytest.mark.parametrize("room", sorted({room.split("/")[0] for room in ROOMS}))
def test_room_stays_small(room: str) -> None:
    files = [path for path in SOURCES if path.is_relative_to(ROOT / "dpipe" / room)]
    assert sum(path.read_text().count("\n") for path in files) <= MAX_ROOM_LINES


@pytest.mark.parametrize("room", sorted({room_of(name) for name in NAMES}))
def test_lines_have_air(room: str) -> None:
    files = [path for path, name in zip(SOURCES, NAMES, strict=True) if room_of(name) == room]
    assert tokens_a_line(files) <= STILL_DENSE.get(room, MAX_TOKENS_A_LINE)


def test_code_has_comments() -> None:
    """Over all rooms together: in some the docstrings are enough."""
    code, comments = zip(*(lines_of_tokens(path.read_text()) for path in SOURCES), strict=True)
    num_code = sum(len(set(lines)) for lines in code)
    num_comments = sum(len(set(lines)) for lines in comments)
    assert 100 * num_comments / num_code >= MIN_COMMENTS_PER_100_LINES


@pytest.mark.parametrize("room", ROOMS)
def test_room_says_why_it_exists_and_what_is_in_it(room: str) -> None:
    folder = ROOT / "dpipe" / room
    index = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    listed = set(re.findall(r"^ *(\w+(?:\.py|/))(?= )", index, re.MULTILINE))
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert listed == files | folders
    assert re.search(r"^To (add|change) ", index, re.MULTILINE), "it says how to add one"


def test_no_two_classes_have_one_name() -> None:
    """Private classes do not count, because they are not used outside their file."""
    homes = defaultdict(list)
    for module, name in MODULES.items():
        for node in tree_of(name).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    assert not {name: places for name, places in homes.items() if len(places) > 1}


def test_every_room_is_drawn() -> None:
    assert {room_of(name) for name in NAMES} <= set(MAY_IMPORT)
