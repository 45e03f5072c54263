from dpipe.search.wire_choice import choose_formats, largest_first
from dpipe.wire.format import HopFormats, wire_bytes

ALLOWED = ("int8", "none", "bf16")


def test_formats_are_ordered_by_what_they_take() -> None:
    assert largest_first(("int4", "none", "int8", "fp16", "bf16", "int8")) == [
        *("none", "fp16", "bf16", "int8", "int4")
    ]


def test_each_link_has_the_largest_format_that_it_has_time_for() -> None:
    """A step is as long as its busiest link: microseconds a byte, forward 0 1 2, backward 0 1 2."""
    slowness = (1.0, 4.0, 2.0, 1.0, 1.0, 3.9)
    asked = []

    def step_us(formats: HopFormats) -> float:
        names = (*formats.forward, *formats.backward)
        asked.append(formats)
        pairs = zip(slowness, names, strict=True)
        return max(slow * wire_bytes(name, 1 << 10) for slow, name in pairs)

    found = choose_formats(ALLOWED, 3, step_us)
    assert found == HopFormats(forward=("none", "int8", "bf16"), backward=("none", "none", "int8"))
    assert len(asked) < 25


def test_nothing_is_asked_where_there_is_no_choice() -> None:
    def refuse(formats: HopFormats) -> float:
        raise AssertionError(formats)

    assert choose_formats(("bf16",), 2, refuse) == HopFormats.alike("bf16", 2)
    assert choose_formats(ALLOWED, 0, refuse) == HopFormats((), ())
