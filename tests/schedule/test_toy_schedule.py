"""A schedule that is declared in one file is configured, drawn, simulated, searched and trained."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toy_schedule import TOY, in_pairs

from dpipe.config.load import Config, build
from dpipe.errors import ConfigError
from dpipe.schedule.check import check
from dpipe.schedule.generate import GENERATORS, generate, schedule_names
from dpipe.schedule.text import draw
from dpipe.search.candidates import published


@pytest.fixture
def toy() -> Iterator[None]:
    GENERATORS.add(TOY)
    yield
    GENERATORS.remove(TOY.name)


def test_toy_schedule_is_what_its_docstring_draws() -> None:
    schedule = in_pairs(2, 4)
    check(schedule)
    picture = [line.strip() for line in (in_pairs.__doc__ or "").splitlines() if "rank" in line]
    assert draw(schedule).splitlines() == picture[-2:]


def test_toy_schedule_is_unknown_until_it_is_in_the_table() -> None:
    with pytest.raises(ConfigError, match=r'one of "gpipe", .* "auto", got \'in-pairs\''):
        build({"pipeline": {"schedule": TOY.name}})


@pytest.mark.usefixtures("toy")
def test_toy_schedule_is_generated_by_name_without_parameters() -> None:
    assert schedule_names() == (
        *("gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v", "2bw"),
        "in-pairs",
        "auto",
    )
    assert generate(TOY.name, 2, 4) == in_pairs(2, 4)
    with pytest.raises(ConfigError, match='"in-pairs" has one stage a rank: .* "gpipe", "inter'):
        build({"pipeline": {"schedule": TOY.name, "stages": 4, "stages_per_rank": 2}})


@pytest.mark.usefixtures("toy")
def test_auto_weighs_the_toy_schedule() -> None:
    assert "auto: in-pairs" in [schedule.name for schedule in published(2, 8, 1)]
    assert "auto: in-pairs" not in [schedule.name for schedule in published(4, 8, 2)]


@pytest.mark.usefixtures("toy")
def test_two_stages_train_with_the_toy_schedule(
    tiny: Callable[..., Config], losses: Callable[..., list[float]], tmp_path: Path
) -> None:
    def trained(schedule: str) -> list[float]:
        pipeline = {"pipeline__stages": 2, "pipeline__schedule": schedule}
        return losses(tiny(**pipeline, run__folder=str(tmp_path / schedule)))

    assert trained(TOY.name) == trained("1f1b")
