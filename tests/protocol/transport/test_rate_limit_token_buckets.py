from protocol.transport.rate_limit import SharedTokenBuckets, TokenBuckets


def test_burst_is_followed_by_the_rate() -> None:
    buckets = TokenBuckets(burst=5, rate=2)
    assert sum(buckets.try_take("peer", 0.0) for _ in range(20)) == 5
    assert sum(buckets.try_take("peer", 1.0) for _ in range(20)) == 2
    assert sum(buckets.try_take("peer", 1000.0) for _ in range(20)) == 5


def test_peers_have_separate_buckets() -> None:
    buckets = TokenBuckets(burst=1, rate=1)
    assert not all(buckets.try_take("greedy", 0.0) for _ in range(100))
    assert buckets.try_take("modest", 0.0)


def test_least_recently_used_bucket_is_evicted() -> None:
    buckets = TokenBuckets(burst=1, rate=0.001, max_callers=2)
    assert buckets.try_take("first", 0.0) and buckets.try_take("second", 0.0)
    assert not buckets.try_take("first", 1.0)
    assert buckets.try_take("third", 2.0)  # evicts the second
    assert not buckets.try_take("first", 3.0)
    assert buckets.try_take("second", 4.0)


def test_several_tokens_are_taken_at_once() -> None:
    buckets = TokenBuckets(burst=10, rate=2)
    assert buckets.tokens_left("peer", 0.0) == 10
    assert buckets.try_take("peer", 0.0, 8) and buckets.tokens_left("peer", 0.5) == 3
    assert not buckets.try_take("peer", 0.5, 4)
    assert buckets.try_take("peer", 1.0, 4), "a refused call takes nothing"


def test_all_callers_share_an_overall_bucket() -> None:
    buckets = SharedTokenBuckets(per_peer=TokenBuckets(burst=2, rate=1), overall=TokenBuckets(burst=3, rate=1))
    assert [buckets.charge("first", 0.0) for _ in range(3)] == [None, None, "caller"]
    assert [buckets.charge("second", 0.0) for _ in range(2)] == [None, "all"]
    # If the refused call had taken tokens of its own bucket, the second would have to wait until 3.0.
    assert [buckets.charge("second", now, 2) for now in (1.0, 2.0)] == ["all", None]
