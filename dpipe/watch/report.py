"""What `dpipe watch` shows as one HTML file that needs no server, and several runs in one file.

The page, its style and its scripts are those of the server. What would be sent to it is in the file
as JSON, which the browser does not run.
"""

import base64
import hashlib
import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path

from dpipe.errors import ConfigError, RunError
from dpipe.watch.assets import page_files
from dpipe.watch.folder import RunFolder
from dpipe.watch.picture import Picture, as_json, as_table
from dpipe.watch.points import thinned

LOG = logging.getLogger("dpipe")
NAME = "report.html"
_MOST_POINTS = 3000
_PREPARED_S = 120.0  # that a prediction and a trace may take
_STYLE = re.compile(r'<link rel="stylesheet" href="/page/([\w.]+)">\n')
_SCRIPT = re.compile(r'<script src="/page/([\w.]+)" defer></script>\n')
_ICON = re.compile(r'<link rel="icon"[^>]*>\n')


def write_report(runs: Sequence[str], out: str | None, *, trust_code: bool = False) -> Path:
    """Returns the file. Raises `ConfigError` for what is no run, `RunError` where it cannot be
    written.
    """
    if len(runs) == 1:
        picture, points = _ended(Path(runs[0]), trust_code=trust_code)
        path = Path(out or Path(runs[0]) / NAME)
        page = one_file("index.html", as_json({"points": points, "picture": as_table(picture)}))
    else:
        path = Path(out or NAME)
        compared = []
        for run in runs:
            picture, points = _ended(Path(run), trust_code=trust_code)
            sent_mb = points[-1][5]
            table = as_table(picture) | {"sent_mb": sent_mb, "lanes": None}
            compared.append({"points": points, "picture": table})
        page = one_file("compare.html", as_json(compared))
    try:
        # Never through a link, which a copied folder may hold.
        path.unlink(missing_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; give another --out") from None
    return path


def write_at_end(folder: Path, *, trust_code: bool = False) -> None:
    """A run has ended, and its report is written by itself. Nothing that goes wrong here is a
    failure of the run: it is logged.
    """
    try:
        path = write_report([str(folder)], None, trust_code=trust_code)
    except Exception as error:
        LOG.warning("the run has no %s: %s; dpipe report %s tries again", NAME, error, folder)
    else:
        LOG.info("report in %s", path)


def _ended(folder: Path, *, trust_code: bool) -> tuple[Picture, list[list[float | None]]]:
    """The run as it is now, with what takes a while."""
    source = RunFolder(folder, trust_code=trust_code)
    try:
        until = time.monotonic() + _PREPARED_S
        picture = source.poll()
        while source.is_preparing and time.monotonic() < until:
            time.sleep(0.05)
            picture = source.poll()
        points = thinned(source.points.points, _MOST_POINTS)
    finally:
        source.close()
    # Such as the folder of a run that failed before its first step.
    if not points:
        raise ConfigError(f"{folder} has no step yet; there is nothing to report")
    return picture, [list(point) for point in points]


def one_file(name: str, content: str) -> str:
    """The page with its files in it, and `content` (JSON) for its script. The policy allows the
    scripts that are in it by their hashes, and nothing else.
    """
    files = {key: value.decode() for key, value in page_files().items()}
    page = _ICON.sub("", files[name])
    styles = "".join(files[each] for each in _STYLE.findall(page))
    scripts = [files[each] for each in _SCRIPT.findall(page)]
    page = _SCRIPT.sub("", _STYLE.sub("", page))
    # JSON that ends no script: "<" can only be within a text.
    data = content.replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; "
        f"style-src {_hash(styles)}; base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{styles}</style>\n'
    )
    tail = [f'<script type="application/json" id="report">{data}</script>']
    tail += [f"<script>{script}</script>" for script in scripts]
    page = page.replace("<title>", head + "<title>", 1)
    # Behind the body: a script that is in the page cannot be deferred.
    return page.replace("</body>", "\n".join(tail) + "\n</body>", 1)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
