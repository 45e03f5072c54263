"""Which layers replicas exchange as one, where they are cut differently."""

from dpipe.schedule.segments import on_stage, segments_of


def test_segments_lie_in_one_stage_of_each_replica() -> None:
    segments = segments_of([(4, 2), (2, 4)])
    held = [(list(segment.layers), segment.stages) for segment in segments]
    assert held == [([0, 1], (0, 0)), ([2, 3], (0, 1)), ([4, 5], (1, 1))]


def test_replicas_that_are_cut_alike_have_a_segment_for_each_stage() -> None:
    segments = segments_of([(3, 1, 2)] * 3)
    assert [segment.stages for segment in segments] == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]


def test_stage_that_others_hold_elsewhere_altogether_is_found() -> None:
    segments = segments_of([(1, 1, 4), (4, 1, 1)])
    assert [segment.stages for segment in segments] == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)]


def test_stage_exchanges_its_last_layers_first() -> None:
    segments = segments_of([(4, 2), (2, 4)])
    assert on_stage(segments, 0, 0) == (1, 0)
    assert on_stage(segments, 1, 0) == (0,)
    assert on_stage(segments, 1, 1) == (2, 1)
