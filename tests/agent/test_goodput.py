from dpipe.agent.goodput import Goodput


def test_time_is_lost_from_the_end_of_an_epoch_to_a_step_that_is_new() -> None:
    goodput = Goodput(0)
    assert (goodput.share, goodput.lost_s(5.0), goodput.run_s(5.0)) == (None, 0.0, 0.0)
    assert goodput.begin(0, 10.0) == 0
    for step in range(1, 7):
        goodput.reach(step, 10.0 + step)
    goodput.end(17.0)
    goodput.end(17.5)
    assert goodput.lost_s(18.0) == 1.0
    assert goodput.begin(4, 19.0) == 2
    for step in (5, 6):
        goodput.reach(step, 15.0 + step)
    assert goodput.lost_s(21.5) == 4.5, "they were made again"
    goodput.reach(7, 22.0)
    assert (goodput.lost_s(30.0), goodput.run_s(30.0)) == (5.0, 20.0)
    assert goodput.share == 1 - 2 / 9


def test_coordinator_that_is_started_again_counts_anew() -> None:
    """The steps beyond its journal are those of the epoch that went on."""
    goodput = Goodput(40)
    goodput.end(1.0)
    assert goodput.lost_s(9.0) == 0.0, "nothing has begun"
    assert goodput.begin(38, 10.0) == 2
    goodput.reach(41, 12.0)
    assert goodput.share == 1 - 2 / 3


def test_row_says_what_was_lost_until_then() -> None:
    goodput = Goodput(best=0)
    goodput.begin(0, now=0.0)
    row = {"step": 0, "loss": 1.0}
    assert goodput.added_to(row, 0.0) == row, "nothing has been made"
    goodput.reach(4, 4.0)
    goodput.end(5.0)
    goodput.begin(3, 6.0)
    goodput.reach(4, 7.0)
    goodput.reach(5, 8.0)
    assert goodput.added_to(row, 9.0) == {**row, "goodput": 5 / 6, "lost_s": 3.0}
    held_out = {"step": 4, "held_out_loss": 1.0}
    assert goodput.added_to(held_out, 9.0) == held_out
