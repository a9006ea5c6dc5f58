"""Workers that start and end together, counted as one."""

from diptych.cluster.common.gang import gang_of, members, rank_of
from diptych.cluster.control.plan import Phase, PlannedWorker, gangs_of


def test_ids_say_whose_they_are() -> None:
    assert members("decode-3", 1) == ["decode-3"]
    assert members("decode-3", 3) == ["decode-3.0", "decode-3.1", "decode-3.2"]
    for size in (1, 3):
        assert [rank_of(each) for each in members("decode-3", size)] == list(range(size))
        assert {gang_of(each) for each in members("decode-3", size)} == {"decode-3"}


def test_a_gang_is_as_far_as_its_last_member_and_ends_with_its_first() -> None:
    def gang(*phases: Phase) -> PlannedWorker:
        views = [PlannedWorker(f"decode-3.{rank}", "decode", phase, 2 + rank) for rank, phase in enumerate(phases)]
        [alone, found] = gangs_of([PlannedWorker("decode-2", "decode", Phase.READY, 7), *views])
        assert alone == PlannedWorker("decode-2", "decode", Phase.READY, 7)
        return found

    assert gang(Phase.READY, Phase.READY) == PlannedWorker("decode-3", "decode", Phase.READY, 5)
    assert gang(Phase.READY, Phase.STARTING).phase is Phase.STARTING
    assert gang(Phase.DRAINING, Phase.DRAINING).phase is Phase.DRAINING
    assert gang(Phase.STARTING, Phase.STOPPING).phase is Phase.STOPPING
