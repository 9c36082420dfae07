import json

from persia.modes import Gba, HopBw, Sync
from persia.replay import ReportLine, Setting, record, simulate, steady, table

SETTING = Setting(steady([1, 1, 1, 4]), local_batch=10)


def lines():
    modes = {"sync": Sync(), "gba": Gba(40), "hop_bw": HopBw(1)}
    return [ReportLine(name, simulate(mode, SETTING, 80).summary(), auc=0.75) for name, mode in modes.items()]


def test_a_line_of_the_table_for_each_run():
    head, *rows = table(lines()).splitlines()
    assert [row.split()[0] for row in rows] == ["sync", "gba", "hop_bw"]
    assert {len(row) for row in rows} == {len(head)}
    assert rows[0].split()[1:7] == ["0.7500", "10", "2", "2", "0", "0"]


def test_records_are_json_with_the_columns_of_the_paper():
    sync, gba, hop_bw = json.loads(json.dumps([record(line) for line in lines()]))
    assert sync["rows_per_second"] == 10
    assert sync["rows_per_second_by_worker"] == [2.5] * 4
    assert gba["rows_per_second"] > 3 * sync["rows_per_second"]
    assert gba["rows_per_second_by_worker"][3] < gba["rows_per_second_by_worker"][0]
    assert gba["dense_staleness_max"] >= gba["dense_staleness_mean"] > 0
    assert hop_bw["dropped_batches"] > 0
    assert gba["lost_tokens"] == gba["dropped_batches"] == 0
