"""scripts/docs fails on a warning and on a dead link."""

import shlex
import subprocess
import sys
from pathlib import Path

from pages import DOCS, ROOT


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build `folder` as scripts/docs builds docs/."""
    lines = (ROOT / "scripts/docs").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if " -m sphinx " in line]
    options = shlex.split(line.replace('"$@"', ""))[1:-2]
    there = ["--conf-dir", str(DOCS), str(folder), str(folder / "build")]
    return subprocess.run(
        [sys.executable, *options, *there], capture_output=True, text=True, timeout=90, cwd=ROOT
    )


WRONG = """# A page

[nowhere](nowhere.md)

[no heading](index.md#such)

```{literalinclude} missing.py
```
"""


def test_dead_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text(WRONG, encoding="utf-8")
    result = build(tmp_path)
    assert result.returncode == 1
    assert "cross-reference target not found: 'nowhere.md'" in result.stderr
    assert "local id not found in doc 'index': 'such'" in result.stderr
    assert "missing.py" in result.stderr


def test_page_with_valid_links_is_built_and_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text("# A page\n\n[It](#a-page)\n", encoding="utf-8")
    result = build(tmp_path)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "build/index.html").read_text(encoding="utf-8")
    assert 'src="http' not in page
    assert 'rel="stylesheet" type="text/css" href="http' not in page
