"""What the demo printed, and the pages that show it."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

Script = Callable[[str], ModuleType]

OUTPUT = """\
installing
step 0  held-out loss 5.5
{steps}
step 9  held-out loss 2.1

9 steps in 12 s of training (runs/demo-20261123-135817)
held-out loss 3.0 beats the bigram entropy 3.4
step time: predicted 100.0 ms, measured 105.0 ms, measured / predicted 1.050 (median of the last 3 steps)
"""  # noqa: E501 - as it is printed
STEPS = [f"step {step}/9  loss 5" for step in range(1, 10)]


def test_most_steps_are_left_out_of_what_is_shown(script: Script) -> None:
    text = script("demo_page").shown(OUTPUT.format(steps="\n".join(STEPS)))
    assert text.splitlines()[:9] == [
        "step 0  held-out loss 5.5",
        *STEPS[:3],
        "...",
        *STEPS[-3:],
        "step 9  held-out loss 2.1",
    ]
    assert text.endswith("(median of the last 3 steps)\n")


def test_pages_show_what_the_file_has(script: Script) -> None:
    module = script("demo_page")
    text = module.KEPT.read_text(encoding="utf-8")
    first_run = module.PAGES["first-run.md"].read_text(encoding="utf-8")
    results = module.PAGES["results.md"].read_text(encoding="utf-8")
    assert module.first_run(first_run, text) == first_run
    assert module.results(results, text) == results


def test_new_output_is_kept_and_written_into_the_pages(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("demo_page")
    pages = {}
    for name, page in module.PAGES.items():
        pages[name] = tmp_path / name
        pages[name].write_bytes(page.read_bytes())
    monkeypatch.setattr(module, "PAGES", pages)
    monkeypatch.setattr(module, "KEPT", tmp_path / "kept.txt")
    output = tmp_path / "demo.txt"
    output.write_text(OUTPUT.format(steps="\n".join(STEPS)), encoding="utf-8")
    result = CliRunner().invoke(module.main, [str(output)])
    assert result.exit_code == 0, result.output
    first_run = pages["first-run.md"].read_text(encoding="utf-8")
    assert "This is the output of 2026-11-23 on" in first_run
    assert (tmp_path / "kept.txt").read_text(encoding="utf-8") in first_run
    results = pages["results.md"].read_text(encoding="utf-8")
    assert "9 steps of a small GPT in four processes take 12 s." in results
    assert "measured / predicted 1.050" in results


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("Killed\n", "no line of step 0"),
        ("step 0  held-out loss 5.5\n", "has 0 steps; let it end"),
        (OUTPUT.split("9 steps")[0], "has no"),
    ],
)
def test_output_of_a_demo_that_failed_is_refused(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, reason: str
) -> None:
    module = script("demo_page")
    monkeypatch.setattr(module, "KEPT", tmp_path / "kept.txt")
    path = tmp_path / "demo.txt"
    path.write_text(output.format(steps="\n".join(STEPS)), encoding="utf-8")
    result = CliRunner().invoke(module.main, [str(path)])
    assert result.exit_code == 1
    assert reason in result.output
    assert not (tmp_path / "kept.txt").exists()
