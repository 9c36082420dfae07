"""The map from buckets of ids to PSs, and its changes."""

import pickle

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import ConfigError
from persia.rpc.array_encoding import Decoder, encode
from persia.types import BUCKETS, BucketMap
from support.bucket_maps import bucket_maps
from support.examples import examples
from support.twins import bucket_maps as twin

numbers_of_servers = st.integers(1, 12) | st.sampled_from([BUCKETS // 3, BUCKETS - 1, BUCKETS])


@given(servers=numbers_of_servers)
def test_the_first_map_has_equal_ranges(servers):
    first = BucketMap.even(servers)
    assert (first.version, first.servers) == (0, servers)
    assert first.owners.tolist() == twin.even(servers)
    assert [server for server, _ in first.runs] == list(range(servers))
    assert np.ptp(first.counts) <= 1


def assert_nobody_both_loses_and_gains(before, after):
    moved = after.owners != before.owners
    assert not set(before.owners[moved]) & set(after.owners[moved])


@settings(max_examples=examples(60))
@given(buckets=bucket_maps(), servers=numbers_of_servers)
def test_a_move_equals_the_twin_balances_and_moves_as_few_buckets_as_possible(buckets, servers):
    after = buckets.moved(servers)
    assert after.owners.tolist() == twin.moved(buckets.owners.tolist(), servers)
    assert after.servers == servers
    assert np.ptp(after.counts) <= 1
    # A PS keeps at most the share of a balanced map, and only as many PSs as the remainder keep one bucket more.
    least, more = divmod(BUCKETS, servers)
    before = buckets.counts[:servers]
    most_kept = np.minimum(before, least).sum() + min(more, (before > least).sum())
    moved = int((after.owners != buckets.owners).sum())
    assert moved == BUCKETS - most_kept
    assert_nobody_both_loses_and_gains(buckets, after)
    changed = moved or servers != buckets.servers
    assert after.version == buckets.version + bool(changed)
    assert (after is buckets) == (not changed)


@given(servers=st.integers(1, 64))
def test_a_ps_that_joins_gets_all_that_moves_and_at_most_its_share(servers):
    before = BucketMap.even(servers)
    after = before.moved(servers + 1)
    moved = after.owners != before.owners
    assert (after.owners[moved] == servers).all()
    assert moved.mean() <= 1 / (servers + 1)


def test_the_way_back_balances_too():
    five = BucketMap.even(4).moved(5)
    four = five.moved(4)
    assert four.version == 2
    assert (five.owners[four.owners != five.owners] == 4).all()
    assert four.counts.tolist() == [1024] * 4


@settings(max_examples=examples(60))
@given(buckets=bucket_maps(), data=st.data())
def test_a_ps_is_emptied_as_by_the_twin_and_other_buckets_stay(buckets, data):
    some = st.sets(st.integers(0, buckets.servers - 1), max_size=buckets.servers - 1)
    leaving = data.draw(some)
    after = buckets.emptied(leaving)
    assert after.owners.tolist() == twin.emptied(buckets.owners.tolist(), buckets.servers, leaving)
    assert after.servers == buckets.servers
    assert after.counts[list(leaving)].sum() == 0
    stays = ~np.isin(buckets.owners, list(leaving))
    np.testing.assert_array_equal(after.owners[stays], buckets.owners[stays])
    assert (after is buckets) == stays.all()
    assert_nobody_both_loses_and_gains(buckets, after)


def test_an_even_map_stays_even_when_a_ps_is_emptied_and_when_it_returns():
    without = BucketMap.even(4).emptied([2])
    assert without.counts.tolist() == [1366, 1365, 0, 1365]
    assert without.emptied([2]) is without
    again = without.moved(4)
    assert again.counts.tolist() == [1024] * 4
    assert (again.owners[again.owners != without.owners] == 2).all()


@given(buckets=bucket_maps(), bucket=st.integers(0, BUCKETS - 1), data=st.data())
def test_one_bucket_moves(buckets, bucket, data):
    server = data.draw(st.integers(0, buckets.servers - 1))
    after = buckets.reassigned(bucket, server)
    assert after.owners[bucket] == server
    changed = np.flatnonzero(after.owners != buckets.owners).tolist()
    assert changed == ([] if buckets.owners[bucket] == server else [bucket])
    assert after.version == buckets.version + len(changed)


@given(bucket_maps())
def test_maps_are_values_and_cross_processes(buckets):
    same = [
        BucketMap(buckets.version, buckets.servers, buckets.runs),
        pickle.loads(pickle.dumps(buckets)),
        msgspec.json.decode(msgspec.json.encode(buckets), type=BucketMap),
        Decoder(BucketMap).decode(encode(buckets, 0)[0], []),
    ]
    for other in same:
        assert other == buckets
        assert hash(other) == hash(buckets)
        np.testing.assert_array_equal(other.owners, buckets.owners)
    with pytest.raises(ValueError, match="read-only"):
        buckets.owners[0] = 0
    with pytest.raises(AttributeError):
        buckets.version = 7


@pytest.mark.parametrize(
    "runs",
    [
        (),
        ((0, BUCKETS - 1),),
        ((0, BUCKETS + 1),),
        ((0, BUCKETS), (1, 1), (0, -1)),
        ((0, BUCKETS), (1, 0)),
        ((2, BUCKETS),),
        ((-1, BUCKETS),),
        ((0, 1), (0, BUCKETS - 1)),
    ],
)
def test_maps_that_lack_a_bucket_or_a_ps_are_refused(runs):
    with pytest.raises(ConfigError):
        BucketMap(0, 2, runs)


def test_ps_that_do_not_exist_are_refused():
    four = BucketMap.even(4)
    for servers in (0, BUCKETS + 1, True):
        for make in (BucketMap.even, four.moved):
            with pytest.raises(ConfigError, match="number of embedding PSs"):
                make(servers)
    for call in (lambda: four.emptied([4]), lambda: four.reassigned(0, 4), lambda: four.reassigned(BUCKETS, 0)):
        with pytest.raises(ConfigError, match="Invalid"):
            call()
    with pytest.raises(ConfigError, match="Cannot empty all 4 PSs"):
        four.emptied(range(4))
