"""Builds dpipe: compiles protos/ into dpipe/wire/v1 before the package is collected, editable or
not.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
GENERATED = "dpipe.wire.v1"


def compile_protos() -> None:
    """Write `*_pb2.py` and `*_pb2.pyi` beside the package path that each proto mirrors."""
    from grpc_tools import protoc

    sources = sorted(str(path) for path in (ROOT / "protos").rglob("*.proto"))
    arguments = [
        "protoc",
        f"-I{ROOT / 'protos'}",
        f"--python_out={ROOT}",
        f"--pyi_out={ROOT}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit(f"protoc failed on {', '.join(sources)}")


class BuildWithProtos(build_py):
    def run(self) -> None:
        compile_protos()
        # Packages were looked for before its folder was there.
        if GENERATED not in self.packages:
            self.packages.append(GENERATED)
        super().run()


setup(cmdclass={"build_py": BuildWithProtos})
