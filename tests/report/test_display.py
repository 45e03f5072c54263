import os
from io import StringIO

import pytest
from rich.console import Console

from dpipe.report.display import Display, lasting

ROW = {
    "step": 4,
    "loss": 2.531,
    "learning_rate": 3e-3,
    "tokens_per_s": 8400.0,
    "step_s": 12.5,
    "bubble": 0.314,
    "mb_per_s": {"1->0": 2.0, "0->1": 2.13},
}


def shown(terminal: bool, *rows: dict[str, object]) -> str:
    out = StringIO()
    with Display(
        Console(file=out, force_terminal=terminal, width=160), first_step=0, num_steps=10
    ) as display:
        for row in rows:
            display.show(row)
    return out.getvalue()


def test_row_is_a_plain_line_where_there_is_no_terminal() -> None:
    line = (
        "step 5/10  loss 2.5310  lr 3.0e-03  8,400 tokens/s  bubble 31%  MB/s 0->1 2.1 1->0 2.0"
        "  ETA 0:01:02\n"
    )
    assert shown(False, ROW) == line


def test_link_that_is_relayed_is_marked() -> None:
    text = shown(False, {**ROW, "relayed": ["0->1"]})
    assert "MB/s 0->1 2.1 (relayed) 1->0 2.0" in text


def test_terminal_shows_progress_and_time_left() -> None:
    text = shown(True, ROW)
    assert "loss 2.5310" in text
    assert "5/10" in text
    assert "ETA" in text


def test_held_out_loss_has_a_line_of_its_own() -> None:
    line = "step 5  held-out loss 2.2500, perplexity 9.49\n"
    assert shown(False, {"step": 5, "held_out_loss": 2.25}) == line


def test_loss_of_a_model_that_knows_nothing_has_no_perplexity() -> None:
    row = {"step": 5, "held_out_loss": 2.25, "held_out_accuracy": 0.4832}
    line = "step 5  held-out loss 2.2500, perplexity 9.49, token accuracy 48.3%\n"
    assert shown(False, row) == line
    line = "step 5  held-out loss 30.0000\n"
    assert shown(False, {"step": 5, "held_out_loss": 30.0}) == line


@pytest.mark.parametrize("buffering", ["line by line", "as a whole"])
def test_output_that_is_full_is_given_up_with_one_warning(
    buffering: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The failed write used to end the training."""
    with open("/dev/full", "w", buffering=1 if buffering == "line by line" else -1) as full:
        console = Console(file=lasting(full))
        with Display(console, first_step=0, num_steps=10) as display:
            for _ in range(3):
                display.show(ROW)
        console.print("the end")
    assert [record.getMessage() for record in caplog.records] == [
        "cannot write to /dev/full ([Errno 28] No space left on device): the run continues, and "
        "nothing more is shown"
    ]


def test_output_that_was_closed_is_left_alone(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    """Python 3.13 flushes what is collected, and warns of an error there."""
    with open(tmp_path / "out.txt", "w") as closed:
        out = lasting(closed)
        out.write("a line")
    out.write("another")
    out.flush()
    assert not caplog.records
    assert (tmp_path / "out.txt").read_text() == "a line"


def test_output_that_nobody_reads_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """By default rich would end the process."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        Console(file=lasting(closed)).print("the end")
    assert "Broken pipe" in caplog.text


def test_missing_output_is_not_written() -> None:
    Console(file=lasting(None)).print("the end")
