from dataplane.ratelimit import TokenBucket


def test_a_burst_then_the_rate():
    bucket = TokenBucket(rate=10.0, burst=3.0)
    assert [bucket.take(0.0) for _ in range(5)] == [True, True, True, False, False]
    assert not bucket.take(0.09)
    assert bucket.take(0.2)
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]


def test_it_saves_up_no_more_than_the_burst_and_grants_the_rate_over_time():
    bucket = TokenBucket(rate=100.0, burst=5.0)
    assert sum(bucket.take(ms / 1000) for ms in range(1000)) in range(103, 106)
