"""The choice of the stage that a peer keeps beside its own, and of the rounds whose states are kept."""

import random
from collections import Counter

from node.daemon.stored_states.choice import RoundFilter, choose_kept_stage
from protocol.membership.record_fields import KeptState, encode_kept_states
from protocol.murmur_pb2 import PeerRecord

STAGES = 4


def trainer(stage: int, round_number: int = 5) -> PeerRecord:
    return PeerRecord(role="trainer", stage=stage + 1, round=round_number, digest=bytes(32))


def keeping(record: PeerRecord, *stages: int) -> PeerRecord:
    kept = PeerRecord()
    kept.CopyFrom(record)
    kept.kept = encode_kept_states(KeptState(stage, 5, bytes(32), 100, bytes([1]) * 32) for stage in stages)
    return kept


def choose(records: dict[str, PeerRecord], me: str, current: int | None = None) -> int | None:
    return choose_kept_stage(records, STAGES, me, records[me].stage - 1, current)


def by_lot(records: dict[str, PeerRecord], draw: random.Random) -> Counter[int]:
    """Each peer keeps any other stage, whoever else keeps it."""
    chosen = ((record.stage + draw.randrange(STAGES - 1)) % STAGES for record in records.values())
    return Counter(chosen)


def settle(records: dict[str, PeerRecord], seed: int, rounds: int = 6) -> tuple[Counter[int], int]:
    """Let all peers choose again and again in any order; return the keepers by stage and the moves of the last time."""
    draw, current = random.Random(seed), dict[str, int | None]()
    moves = 0
    for _ in range(rounds):
        moves = 0
        for peer in draw.sample(sorted(records), len(records)):
            chosen = choose(records, peer, current.get(peer))
            moves += chosen != current.get(peer)
            current[peer] = chosen
            if chosen is not None:
                records[peer] = keeping(records[peer], chosen)
    return Counter(stage for stage in current.values() if stage is not None), moves


def test_every_stage_has_a_keeper_elsewhere_and_nobody_moves_for_ever() -> None:
    """Control: peers that choose by lot leave some stages without a keeper."""
    gaps = 0
    for seed in range(20):
        draw = random.Random(seed)
        sizes = [1 + draw.randrange(5) for _ in range(STAGES)]
        records = {f"{stage}-{index}": trainer(stage) for stage in range(STAGES) for index in range(sizes[stage])}
        gaps += set(by_lot(records, draw)) != set(range(STAGES))
        kept, moves = settle(records, seed)
        assert set(kept) == set(range(STAGES)) and moves == 0, (seed, sizes, kept)
        others = [sum(sizes) - size for size in sizes]
        assert min(kept.values()) >= min(others) // STAGES, (seed, sizes, kept)
    assert gaps


def test_stage_with_the_fewest_keepers_is_kept_then_that_with_the_fewest_trainers() -> None:
    records = {"me": trainer(0), "a": keeping(trainer(1), 2), "b": keeping(trainer(2), 3), "c": trainer(3)}
    assert choose(records, "me") == 1
    records |= {"b": keeping(trainer(2), 1), "d": keeping(trainer(3), 2), "e": trainer(3), "host": PeerRecord()}
    assert choose(records, "me") == 3, "nobody keeps it"
    records["host"] = keeping(PeerRecord(role="observer"), 1, 2, 3)
    assert choose(records, "me") == 3, "hosts do not count, as they keep all"
    assert choose(records, "me", current=2) == 2, "one more keeper is no reason to move"


def test_own_stage_and_stages_without_a_state_are_not_kept() -> None:
    records = {"me": trainer(0), "b": trainer(0), "a": trainer(1, round_number=0)}
    assert choose(records, "me") is None
    records["a"] = trainer(1, round_number=1)
    assert choose(records, "me") == 1
    gone = {"me": keeping(trainer(0), 1)}
    assert choose(gone, "me", current=1) == 1, "the last keeper of a stage without peers stays"


def test_one_keeper_of_several_moves_to_a_stage_that_has_none() -> None:
    records = {name: keeping(trainer(0), 1) for name in "abcd"} | {"x": trainer(1), "y": trainer(2)}
    movers = [name for name in "abcd" if choose(records, name, current=1) == 2]
    assert len(movers) == 1


def test_marks_grow_with_the_downloads_and_meet_whatever_their_growth() -> None:
    slow, fast = RoundFilter(5.0, 0.05), RoundFilter(5.0, 0.05)
    assert slow.period == 1, "until the rounds are measured"
    for number in range(10):
        slow.observe(number, 2.0 * number)
        fast.observe(number, 20.0 * number)
    assert (slow.period, fast.period) == (4, 1), "5 s are three rounds of 2 s"
    slow.record_fetch("a", 0.5)
    slow.record_fetch("b", 0.5)
    assert slow.period == 16, "a second of downloads in twenty"
    assert [number for number in range(40) if slow.is_chosen(number)] == [0, 16, 32]
    assert all(fast.is_chosen(number) for number in (16, 32))
    slow.forget("b")
    assert slow.period == 8
