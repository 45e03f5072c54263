import time

import pytest

from dpipe.engine.recorder import Recorder


def test_parts_are_added_up_by_name_and_taken_once() -> None:
    recorder = Recorder(0)
    for name, seconds in (("a", 0.002), ("b", 0.0), ("a", 0.003)):
        with recorder.part(name):
            time.sleep(seconds)
    parts = recorder.take_parts()
    assert list(parts) == ["a", "b"]
    assert 5 <= parts["a"] < 500
    assert recorder.take_parts() == {}


def test_part_that_raises_is_also_timed() -> None:
    recorder = Recorder(0)
    with pytest.raises(ValueError, match="out of luck"), recorder.part("a"):
        raise ValueError("out of luck")
    assert recorder.take_parts().keys() == {"a"}
