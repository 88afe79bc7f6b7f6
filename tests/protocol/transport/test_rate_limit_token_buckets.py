from protocol.transport.rate_limit import SharedTokenBuckets, TokenBuckets


def test_a_burst_and_then_the_rate() -> None:
    allowance = TokenBuckets(burst=5, rate=2)
    assert sum(allowance.try_take("peer", 0.0) for _ in range(20)) == 5
    assert sum(allowance.try_take("peer", 1.0) for _ in range(20)) == 2
    assert sum(allowance.try_take("peer", 1000.0) for _ in range(20)) == 5


def test_one_peer_does_not_use_up_another_ones() -> None:
    allowance = TokenBuckets(burst=1, rate=1)
    assert not all(allowance.try_take("greedy", 0.0) for _ in range(100))
    assert allowance.try_take("modest", 0.0)


def test_callers_are_bounded_and_the_longest_silent_goes() -> None:
    allowance = TokenBuckets(burst=1, rate=0.001, max_callers=2)
    assert allowance.try_take("first", 0.0) and allowance.try_take("second", 0.0)
    assert not allowance.try_take("first", 1.0)
    assert allowance.try_take("third", 2.0)  # pushes out the second
    assert not allowance.try_take("first", 3.0)
    assert allowance.try_take("second", 4.0)


def test_what_is_taken_may_be_more_than_one_at_a_time() -> None:
    allowance = TokenBuckets(burst=10, rate=2)
    assert allowance.tokens_left("peer", 0.0) == 10
    assert allowance.try_take("peer", 0.0, 8) and allowance.tokens_left("peer", 0.5) == 3
    assert not allowance.try_take("peer", 0.5, 4)
    assert allowance.try_take("peer", 1.0, 4), "what was refused took nothing"


def test_all_together_have_one_as_well() -> None:
    allowance = SharedTokenBuckets(per_peer=TokenBuckets(burst=2, rate=1), overall=TokenBuckets(burst=3, rate=1))
    assert [allowance.charge("first", 0.0) for _ in range(3)] == [None, None, "caller"]
    assert [allowance.charge("second", 0.0) for _ in range(2)] == [None, "all"]
    # Had what was refused taken of its own share, the second would have to wait until 3.0.
    assert [allowance.charge("second", now, 2) for now in (1.0, 2.0)] == ["all", None]
