"""What a change of the data means for a run: the decisions of `begin_source`, without a trainer."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import ConfigError
from persia.trainer.data_progress import Begun, DataProgress, begin_source, begin_stream, fingerprint_of_object
from persia.types import SourceFingerprint, SourcePart
from support.examples import examples

ORDER = {"batch_size": "100", "shuffle_rows": "0"}


def files(*names, rows=None, order=None, numbered=False):
    parts = tuple(SourcePart(f"/data/{name}", 1000, 7) for name in names)
    return SourceFingerprint("csv", parts, rows or {}, order or ORDER, numbered)


def trained(source, passes=1, position=0):
    """The progress of a run after some passes, and so many batches of the next one."""
    progress = begin_source(DataProgress(), 0, source).progress
    for _ in range(passes):
        progress = progress.begin_pass().end_pass()
    return progress.begin_pass() if position else progress


def begin(progress, position, source, **options):
    return begin_source(progress, position, source, exists=lambda path: True, **options)


def test_the_same_source_continues_without_a_word():
    source = files("a", "b")
    assert begin(trained(source), 0, source) == Begun(trained(source), 0)
    progress = trained(source, 2, 5)
    assert begin(progress, 5, source) == Begun(progress, 5)
    assert (progress.epoch, progress.done, progress.current.number) == (2, 2, 2)


def test_other_data_begin_at_their_first_batch_and_epoch():
    begun = begin(trained(files("a"), 3), 0, files("b", "c"))
    assert begun.notice == "Continuing the model on other data: 2 files, none seen before."
    assert (begun.progress.epoch, begun.position) == (0, 0)
    assert begun.progress.begin_pass().current.read is None


def test_other_data_during_a_pass_log_that_it_stays_incomplete():
    begun = begin(trained(files("a"), 0, 5), 5, files("b"))
    assert begun.notice == (
        "Continuing the model on other data: /data/b, none seen before. The pass before ends incomplete, at batch 5."
    )
    assert begun.surprising
    assert (begun.progress.epoch, begun.position, begun.progress.current) == (0, 0, None)


def test_a_file_that_was_written_again_is_another_one():
    old = files("a")
    new = msgspec.structs.replace(old, parts=(SourcePart("/data/a", 1000, 8),))
    begun = begin(trained(old, 0, 5), 5, new)
    assert begun.position == 0
    assert "/data/a, 1 of them changed" in begun.notice


def test_new_files_are_trained_first_and_then_all_files():
    begun = begin(trained(files("b", "c"), 2), 0, files("a", "b", "c", "d"))
    assert begun.notice == (
        "Continuing the model on new data: 2 of 4 files, /data/a, /data/d; the others were trained before."
    )
    progress, passes = begun.progress, []
    while progress.left(4):
        progress = progress.begin_pass()
        passes.append((progress.current.epoch, progress.current.read))
        progress = progress.end_pass()
    assert passes == [(0, (0, 3)), (1, (0, 3)), (2, None), (3, None)]


def test_a_pass_under_way_is_finished_before_new_files():
    """In the order that it began with, though the new file sorts before the others."""
    begun = begin(trained(files("b", "c"), 0, 5), 5, files("a", "b", "c"))
    assert begun.position == 5
    assert begun.progress.current.read == begun.progress.current.order == (1, 2)
    after = begun.progress.end_pass()
    assert after.left(1)
    assert after.begin_pass().current.read == (0,)
    assert not after.begin_pass().end_pass().left(1)


def test_a_window_of_days_that_moves_trains_the_new_day():
    progress = trained(files("1", "2", "3"))
    for day in range(4, 8):
        begun = begin(progress, 0, files(*map(str, range(day - 2, day + 1))))
        progress = begun.progress.begin_pass()
        assert progress.current.read == (2,)
        progress = progress.end_pass()
        assert not progress.left(1)
    assert not begin(progress, 0, files("1")).progress.left(1)  # Met long ago.


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"order": ORDER | {"batch_size": "50"}}, r"batch_size changed .*\(batch_size was 100\)"),
        ({"order": ORDER | {"shuffle_rows": "64", "seed": "1"}}, "seed and shuffle_rows changed"),
        ({"rows": {"where": "x > 1"}}, r"where changed .*\(where was not set\)"),
    ],
)
def test_options_that_move_rows_are_refused_only_during_a_pass(changes, named):
    progress, other = trained(files("a", "b"), 1, 5), files("a", "b", **changes)
    with pytest.raises(ConfigError, match=rf"(?s){named}.*restart_data=True.*--restart-data") as refused:
        begin(progress, 5, other)
    assert refused.value.fields["field"] == "train_data"
    again = begin(progress, 5, other, restart=True)
    assert (again.position, again.progress.current) == (0, None)
    ended = begin(progress.end_pass(), 0, other)
    assert ended.progress.left(3)


def test_at_the_end_of_a_pass_rows_identify_the_data():
    progress = trained(files("a"))
    assert not begin(progress, 0, files("a", order=ORDER | {"batch_size": "50"})).progress.left(1)
    filtered = begin(progress, 0, files("a", rows={"where": "x > 1"}))
    assert filtered.progress.left(1)
    assert "seen before, with another where" in filtered.notice


def test_a_missing_file_is_refused_in_the_middle_of_a_pass_only():
    with pytest.raises(ConfigError, match=r"lack 1 of 2 parts in the middle of a pass, at batch 5 .*: /data/a\."):
        begin(trained(files("a", "b"), 0, 5), 5, files("b", "c"))
    begun = begin(trained(files("a", "b"), 0, 5), 5, files("b", "c"), restart=True)
    assert begun.position == 0
    assert begun.progress.begin_pass().current.read is None
    assert begin(trained(files("a", "b")), 0, files("b")).position == 0


def test_files_that_only_number_rows_are_needed_by_random_splits():
    """Rows of `b` are drawn by their number behind those of `a`."""
    first = begin(trained(files("a", numbered=True)), 0, files("a", "b", numbered=True)).progress.begin_pass()
    assert (first.current.order, first.current.read) == ((0, 1), (1,))
    kept = begin(first, 5, files("a", "b", "c", numbered=True)).progress.current
    assert (kept.order, kept.read) == ((0, 1), (1,))
    with pytest.raises(ConfigError, match="lack 1 of 2 parts"):
        begin(first, 5, files("b", "c", numbered=True))
    plain = begin(trained(files("a")), 0, files("a", "b")).progress.begin_pass()
    assert begin(plain, 5, files("b", "c")).progress.current.read == (0,)


def test_files_that_have_been_moved_are_the_same():
    def under(folder):
        return SourceFingerprint("csv", tuple(SourcePart(f"{folder}/d={day}/part", day, day) for day in (1, 2)))

    progress = trained(under("/old"), 1, 5)
    begun = begin_source(progress, 5, under("/new"), exists=lambda path: False)
    assert (begun.position, begun.notice, begun.progress.epoch) == (5, None, 1)
    assert begin_source(progress, 5, under("/new"), exists=lambda path: True).position == 0
    remote = begin_source(progress, 5, under("s3://new"), exists=lambda path: False)
    assert remote.position == 0


def test_again_and_restart():
    progress = trained(files("a"), 3, 5)
    again = begin(progress, 5, files("a"), again=True)
    assert (again.progress.epoch, again.position, again.progress.left(1)) == (0, 0, True)
    restart = begin(progress, 5, files("a"), restart=True)
    assert (restart.progress.epoch, restart.position) == (3, 0)
    assert restart.progress.begin_pass().current.number > progress.current.number  # Batches of the old pass are void.


def test_a_pass_of_which_nothing_was_trained_has_not_begun():
    progress = trained(files("a"), 1).begin_pass()
    begun = begin(progress, 0, files("a", order=ORDER | {"batch_size": "50"}))
    assert begun.progress.begin_pass().current == progress.current


def test_objects_are_data_of_their_own_and_are_not_remembered():
    one, other = fingerprint_of_object([1]), fingerprint_of_object([1])
    assert begin(trained(one, 0, 5), 5, one).position == 5
    begun = begin(trained(one), 0, other)
    assert begun.progress.left(1)
    assert not begun.progress.passes
    assert begun.notice.startswith("Continuing the model on other data: a list, from its first batch.")
    assert not begun.surprising


def test_a_stream_goes_on_whatever_the_count_of_its_calls():
    topic = SourceFingerprint("stream", (SourcePart("clicks"),))
    progress = trained(topic, 1)
    begun = begin_stream(progress, 0, topic)
    assert begun.progress.left(1)
    middle = begun.progress.begin_pass()
    assert begin_stream(middle, 5, topic) == Begun(middle, 5)
    assert begin_stream(trained(files("a"), 0, 5), 5, topic).position == 0
    assert begin(middle, 5, files("a")).position == 0


@given(
    st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=5),
    st.integers(1, 3),
    st.data(),
)
@settings(max_examples=examples(200), deadline=None)
def test_each_file_has_as_many_passes_as_were_asked_for(windows, epochs, data):
    """Over any sequence of sources, with stops in the middle of passes, and however it is recorded in between."""
    progress, position, seen = DataProgress(), 0, {}
    for window in windows:
        source = files(*map(str, sorted(window)))
        try:
            begun = begin(progress, position, source)
        except ConfigError:  # A file of the pass under way is missing.
            begun = begin(progress, position, source, restart=True)
        progress, position = begun.progress, begun.position
        while progress.left(epochs):
            progress = progress.begin_pass()
            read = progress.current.read
            if data.draw(st.booleans(), "stop here"):
                position = 5
                break
            for part in range(len(source.parts)) if read is None else read:
                name = source.parts[part].name
                assert progress.current.epoch == seen.get(name, 0)
                seen[name] = seen.get(name, 0) + 1
            progress, position = progress.end_pass(), 0
        else:
            assert all(seen[part.name] >= epochs for part in source.parts)
        progress = msgspec.convert(msgspec.json.decode(msgspec.json.encode(progress)), DataProgress)
    assert max(seen.values(), default=0) <= epochs


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_a_pass_is_found_by_its_number(counts, under_way):
    """As data loaders do, which know neither passes nor parts."""
    source = files(*map(str, range(len(counts))))
    passes = dict(zip(source.keys(), counts, strict=True))
    progress = DataProgress(source, passes, None, min(counts), 7)
    if under_way:
        progress = progress.begin_pass()
    walked = progress
    for _ in range(8):
        walked = walked.begin_pass()
        assert progress.at(walked.current.number) == walked.current
        walked = walked.end_pass()
