"""Whose code a configuration may run: `model.layers = "os:system"` would call what it names.

    named module lies below the working folder, by its real path         allowed
    an installed package declares it as a `dpipe.models` entry point     allowed
    whatever else, dpipe's own code too                                  needs --trust-code

Nothing is imported to find out. A module that may be named may be named with all that it holds, and
`model.options` are the arguments. An entry point `my-models = "my_models"` allows the modules of
that package, and `"my_models.gpt:layers"` that one function.
"""

import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from site import getusersitepackages

from dpipe.errors import ConfigError
from dpipe.stage.families import FAMILIES, HUB

GROUP = "dpipe.models"
# a virtual environment may lie in the working folder
_INSTALLED = ("site-packages", "dist-packages")
# Some of its functions run commands: none was written to be called by a stranger's configuration.
_CHECKOUT = ("dpipe", "netem", "scripts", "tests", "docs", "setup.py")
_ROOT = Path(__file__).resolve().parents[2]


def refuse_untrusted(layers: str, *, trust_code: bool) -> None:
    """Raises `ConfigError` if `layers`, a `model.layers` that has been checked, names code from
    somewhere else and `trust_code` is false.
    """
    if trust_code or layers in (*FAMILIES, HUB.name) or _is_declared(layers):
        return
    module, _, _ = layers.partition(":")
    folder = Path.cwd().resolve()
    for place in _places(module):
        if not _is_own(place, folder):
            where = "part of Python" if place is None else f"in {place}"
            raise ConfigError(
                f"model.layers {layers!r} would run code that is {where}: neither in the working "
                f"folder {folder} nor declared by an installed package as one of its {GROUP}; if "
                "you trust who wrote this configuration, add --trust-code (in Python: "
                "trust_code=True); a sweep of scripts/ runs only what is the user's or declared"
            )


def _is_declared(layers: str) -> bool:
    module, _, _ = layers.partition(":")
    for declared in entry_points(group=GROUP):
        value = declared.value.replace(" ", "")
        # One function, and no other of its module.
        if value == layers:
            return True
        if ":" not in value and (module == value or module.startswith(f"{value}.")):
            return True
    return False


def _places(module: str) -> Iterator[Path | None]:
    """The files that importing `module` runs, a namespace package's folders among them; None for
    what has no file. It ends early where a part is not found: there is nothing to run then.
    """
    name = ""
    spec: ModuleSpec | None = None
    # Each package on the way: importing `a.b` runs a/__init__.py first.
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = _top(name) if spec is None else _below(name, spec)
        if spec is None:
            return
        if spec.origin is not None:
            yield Path(spec.origin) if spec.has_location else None
        else:
            yield from map(Path, spec.submodule_search_locations or ())


def _top(name: str) -> ModuleSpec | None:
    """As `import` finds it, the working folder last (`stage/model.py` appends it)."""
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__spec__", None) is None:
        # such as `__main__` of a script
        spec = ModuleSpec(name, None, origin=getattr(loaded, "__file__", "nowhere"))
        spec.has_location = hasattr(loaded, "__file__")
        return spec
    return find_spec(name) or PathFinder.find_spec(name, [str(Path.cwd())])


def _below(name: str, package: ModuleSpec) -> ModuleSpec | None:
    """Without importing the package, as `find_spec` of a dotted name would."""
    return PathFinder.find_spec(name, package.submodule_search_locations or [])


def _is_own(place: Path | None, folder: Path) -> bool:
    # Built into the interpreter, or frozen.
    if place is None:
        return False
    # A link in the working folder can lead to a file that somebody else writes.
    real = place.resolve()
    if not real.is_relative_to(folder):
        return False
    if any(name in real.relative_to(folder).parts for name in _INSTALLED):
        return False
    return not any(map(real.is_relative_to, _of_others()))


def _of_others() -> Iterator[Path]:
    """Where Python, what is installed for it and dpipe lie: perhaps below the working folder, which
    may be /, a home or dpipe's checkout.
    """
    paths = sysconfig.get_paths()
    for key in ("stdlib", "platstdlib", "purelib", "platlib"):
        yield Path(paths[key]).resolve()
    yield Path(getusersitepackages()).resolve()
    for name in _CHECKOUT:
        yield _ROOT / name
