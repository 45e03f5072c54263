from typing import Any

import pytest

from dpipe.coordinator.alone import Alone
from dpipe.coordinator.base import Coordination
from dpipe.errors import RunAborted
from dpipe.wire.schema import Schema


def test_alone_gathers_its_own_part():
    alone: Coordination = Alone("here:1")
    gather = alone.gather("step/1", b"x")
    assert gather.done()
    assert gather.wait(0.0) == (b"x",)
    assert alone.share("port", (1, None), 0.0, Schema[Any](Any)) == [[1, None]]
    alone.barrier("end", 0.0)
    assert (alone.addresses, alone.clock_offset_ns) == ({0: "here:1"}, 0)
    alone.leave()
    alone.close()


def test_alone_uploads_to_itself():
    uploads: list[tuple[int, str, bytes]] = []
    Alone(on_upload=lambda *upload: uploads.append(upload)).upload("trace", b"spans")
    Alone().upload("trace", b"nobody wants it")
    assert uploads == [(0, "trace", b"spans")]


def test_alone_aborts_once():
    alone = Alone()
    reasons: list[str] = []
    alone.on_abort(lambda error: reasons.append(str(error)))
    assert str(alone.abort("no memory")) == "rank 0 failed: no memory"
    assert str(alone.abort("later", symptom=True)) == "rank 0 failed: no memory"
    alone.on_abort(lambda error: reasons.append("late"))
    assert reasons == ["rank 0 failed: no memory", "late"]
    with pytest.raises(RunAborted, match="no memory"):
        alone.gather("step/1", b"").wait(1.0)
    with pytest.raises(RunAborted, match="no memory"):
        alone.upload("trace", b"")
