"""A mode of one file and one registration works wherever the built-in ones do."""

from collections import Counter

import msgspec
import pytest

from persia import rpc
from persia.config import convert
from persia.coordinator import TokenScheduler
from persia.errors import ConfigError, WireError
from persia.modes import Async, Asynchronous, Auto, Bsp, ModeSetting, Sync, decode, encode, modules, register
from persia.services import TokenService
from persia.testing import Threads
from persia.trainer.options import TrainerOptions
from support.switching_samples import DEADLINE, ROWS, assert_same, batches, trainer
from support.toy_mode import ASKED, CountedSync, EveryOther


class Unknown(Asynchronous, frozen=True, tag="unknown"):
    """A mode that is not registered."""


def test_it_is_a_setting_of_configurations_and_checkpoints():
    tree = {"kind": "every_other", "limit": 7}
    assert convert(tree, ModeSetting, "here") == EveryOther(7) == decode(encode(EveryOther(7)))
    options = convert({"mode_schedule": [[3, tree]]}, TrainerOptions, "here")
    assert options.mode_schedule == [(3, EveryOther(7))]
    assert convert(msgspec.to_builtins(options), TrainerOptions, "here") == options
    auto = convert({"kind": "auto", "asynchronous": tree}, ModeSetting, "here")
    assert auto == Auto(EveryOther(7))


@pytest.mark.parametrize(
    ("mode", "field", "message"),
    [
        (
            {"kind": "hybird"},
            "mode_schedule[0][1].kind",
            "Invalid mode 'hybird'; expected one of: async, bsp, counted_sync,",
        ),
        ({"kind": "hybrid", "staleness": []}, "mode_schedule[0][1].staleness", "got `array`"),
        ({"kind": "every_other", "limits": 1}, "mode_schedule[0][1]", "unknown field `limits`"),
        (["hybrid"], "mode_schedule[0][1]", "got `list`"),
    ],
)
def test_errors_name_the_field(mode, field, message):
    with pytest.raises(ConfigError) as caught:
        convert({"mode_schedule": [[0, mode]]}, TrainerOptions, "run.toml")
    assert caught.value.fields["field"] == field
    assert message in str(caught.value)


def test_processes_are_told_its_module():
    assert "support.toy_mode" in modules()
    assert not any(name.startswith("persia.") for name in modules())


def test_a_name_is_given_once():
    with pytest.raises(ConfigError, match=r"'bsp' in .*test_toy_mode has the name of a mode in persia\.modes\.bsp"):

        @register
        class Other(Asynchronous, frozen=True, tag="bsp"):
            pass

    assert decode('{"kind":"bsp","batches":3}') == Bsp(3)


def test_roles_send_it_as_itself():
    with rpc.serve(TokenScheduler(DEADLINE), protocol=TokenService) as server:
        tokens = rpc.connect(server.address, TokenService, timeout=DEADLINE)
        tokens.request(EveryOther(7))
        assert tokens.requested() == EveryOther(7)
        tokens.resolve(EveryOther(7))
        assert tokens.requested() is None
        with pytest.raises(WireError, match=r"Invalid mode 'unknown'; expected one of: async, .*every_other"):
            tokens.request(Unknown())
        rpc.close(tokens)


def test_it_trains_embedded_and_the_roles_ask_it():
    data = batches(12)
    ASKED.clear()
    mine, twos = trainer(EveryOther()), trainer(Bsp(2))
    result, expected = mine.fit(data), twos.fit(data)
    assert (result.steps, result.rows) == (expected.steps, expected.rows) == (6, 12 * ROWS)
    assert_same(mine, twos, 0)
    assert Counter(ASKED) == {"arrive": 12, "row_limit": 12}  # Once per batch: at the coordinator, and at the one PS.


def test_ps_ask_a_mode_with_all_reduce_for_each_nn_worker_and_step():
    ASKED.clear()
    cluster = Threads(nn_workers=2, ps=2, timeout=DEADLINE)
    results = cluster.run(lambda member: trainer(CountedSync(), member).fit(batches(8)))
    assert results[0].steps == 4
    assert Counter(ASKED) == {"arrive": 4 * 2 * 2}  # Steps, NN workers, PSs.


def test_ps_ask_it_for_each_push_of_a_single_nn_worker_too():
    ASKED.clear()
    cluster = Threads(nn_workers=1, ps=2, timeout=DEADLINE)
    results = cluster.run(lambda member: trainer(CountedSync(), member).fit(batches(8)))
    assert results[0].steps == 8
    assert Counter(ASKED) == {"arrive": 8 * 2}  # Steps, PSs.


def test_it_limits_rows():
    """With the limit -2, a row that was changed in the step before takes no gradient."""
    mine = trainer(EveryOther(-2))
    result = mine.fit(batches(20, ids=3))
    assert result.steps == 10
    assert mine.embeddings.connection.servers[0].row_staleness().stale > 0


def test_it_trains_on_threads_and_takes_turns_with_other_modes():
    cluster = Threads(nn_workers=2, ps=2, timeout=DEADLINE)
    schedule = [(4, EveryOther()), (8, Async())]

    def work(member):
        t = trainer(Sync(), member, mode_schedule=schedule)
        return t.fit(batches(40)), t

    (result, first), (_, second) = cluster.run(work)
    assert (result.rows, first.mode, second.mode) == (40 * ROWS, Async(), Async())
    assert [switch.after for switch in first.switches] == [EveryOther(), Async()]
