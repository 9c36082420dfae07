"""Bucket maps for property tests."""

from hypothesis import strategies as st

from persia.types import BUCKETS, BucketMap


@st.composite
def bucket_maps(draw, most_servers=5):
    """Maps of any version, with runs of any lengths, in which a PS may own several runs or none."""
    servers = draw(st.integers(1, most_servers))
    ends = sorted(draw(st.sets(st.integers(1, BUCKETS - 1), max_size=8)))
    runs = []
    for begin, end in zip([0, *ends], [*ends, BUCKETS], strict=True):
        owner = draw(st.integers(0, servers - 1))
        if runs and runs[-1][0] == owner:
            runs[-1] = (owner, runs[-1][1] + end - begin)
        else:
            runs.append((owner, end - begin))
    return BucketMap(draw(st.integers(0, 3)), servers, tuple(runs))
