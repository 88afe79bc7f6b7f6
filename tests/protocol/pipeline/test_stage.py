"""Every stage is a run of its own."""

import pytest

from protocol.pipeline.stage import stage_run_id, stage_run_ids

RUN = "ab" * 32


def test_every_stage_of_every_cut_of_every_run_has_an_id_of_its_own() -> None:
    ids = [
        stage_run_id(run, stages, stage)
        for run in (RUN, "cd" * 32)
        for stages in range(2, 12)
        for stage in range(stages)
    ]
    assert len({*ids, RUN}) == len(ids) + 1
    assert all(len(found) == 64 and int(found, 16) >= 0 for found in ids)
    assert stage_run_ids(RUN, 3) == tuple(stage_run_id(RUN, 3, stage) for stage in range(3))


def test_id_of_a_stage_never_changes() -> None:
    """Peers of different versions must agree on it."""
    assert stage_run_id(RUN, 4, 1) == "99b50f75d28de1f448807ae977373090cf150b98f3e560cba40a2c38b52d29d2"


def test_a_run_with_one_stage_keeps_its_id() -> None:
    assert stage_run_ids(RUN, 1) == (RUN,)


@pytest.mark.parametrize(("stages", "stage"), [(4, 4), (4, -1), (0, 0)])
def test_a_stage_that_is_not_there_has_no_id(stages: int, stage: int) -> None:
    with pytest.raises(ValueError, match="there is no stage"):
        stage_run_id(RUN, stages, stage)
