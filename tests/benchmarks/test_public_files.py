"""The published files of Taobao-Ad, Avazu and Criteo: their headers, missing values and names."""

import gzip
from datetime import date

import numpy as np
import pytest

from benchmarks import paper, paper_runs, public_files
from persia.errors import DataError

RAW_SAMPLE = (
    "user,time_stamp,adgroup_id,pid,nonclk,clk\n"
    "581738,1494137644,1,430548_1007,1,0\n"
    "449818,1494638778,3,430548_1007,0,1\n"
    "914836,1494650879,4,430539_1007,1,0\n"
)
AD_FEATURE = (
    "adgroup_id,cate_id,campaign_id,customer,brand,price\n"
    "3,6406,83237,1,95471,170.0\n"
    "1,6406,83237,1,NULL,0.0\n"
    "4,9025,83237,1,87331,1.0E8\n"
)
USER_PROFILE = (
    "userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,shopping_level,occupation,"
    "new_user_class_level \n"  # The published header ends with a space.
    "449818,0,5,2,5,,3,0,3\n"
    "914836,0,4,2,4,1,3,0,\n"
)
AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21\n"
    "1000009418151094273,0,14102100,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,a99f214a,ddd2926e,"
    "44956a24,1,2,15706,320,50,1722,0,35,-1,79\n"
    "10000169349117863715,1,14103023,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,a99f214a,96809ac8,"
    "711ee120,1,0,15704,320,50,1722,0,35,100084,79\n"
)
CRITEO = (
    "0\t1\t1\t5\t0\t1382\t4\t15\t2\t181\t1\t2\t\t2\t68fd1e64\t80e26c9b\tfb936136\t7b4723c4\t25c83c98\t7e0ccccf\tde7995b8\t"
    "1f89b562\ta73ee510\ta8cd5504\tb2cb9c98\t37c9c164\t2824a5f6\t1adce6ef\t8ba8b39a\t891b62e7\te5ba7672\tf54016b9\t"
    "21ddcdc9\tb1252a9d\t07b5194c\t\t3a171ecb\tc5c50484\te8b83407\t9727dd16\n"
    "1\t2\t-1\t44\t1\t102\t8\t2\t2\t4\t1\t1\t\t4\t68fd1e64\tf0cf0024\t6f67f7e5\t41274cd7\t25c83c98\tfe6b92e5\t922afcc0\t"
    "0b153874\ta73ee510\t2b53e5fb\t4f1b46f3\t623049e6\td7020589\tb28479f6\te6c5b5cd\tc92f3b61\t07c540c4\tb04e4670\t"
    "21ddcdc9\t5840adea\t60f6221e\t\t3a171ecb\t43f13e8b\te8b83407\t731c3655\n"
)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Returns a function that writes files into a directory of PERSIA_DATA."""
    monkeypatch.setenv("PERSIA_DATA", str(tmp_path))

    def write(name, **files):
        (tmp_path / name).mkdir(exist_ok=True)
        for file, text in files.items():
            path = tmp_path / name / file.replace("__", ".")
            path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return tmp_path / name

    return write


def rows_of(source):
    schema, batches = paper_runs.SOURCES[source](100, 0)
    (batch,) = batches
    batch.validate(schema)
    return schema, batch


@pytest.mark.parametrize("suffix", ["", "__gz"])
def test_the_files_of_taobao_are_joined(folder, suffix):
    files = {"raw_sample__csv": RAW_SAMPLE, "ad_feature__csv": AD_FEATURE, "user_profile__csv": USER_PROFILE}
    folder("taobao_ad", **{f"{name}{suffix}": text for name, text in files.items()})
    schema, batch = rows_of("taobao_file")
    ids = batch.id_features
    assert [feature.name for feature in schema.id_features] == list(ids)
    assert len(ids) == 15
    assert batch.labels[:, 0].tolist() == [0.0, 1.0, 0.0]
    assert batch.dense[:, 0] == pytest.approx([0.0, np.log(171.0), np.log1p(1e8)], rel=1e-6)
    assert ids["cate_id"].values[0] == ids["cate_id"].values[1] != ids["cate_id"].values[2]
    assert ids["pid"].values[0] == ids["pid"].values[1] != ids["pid"].values[2]
    assert len(set(ids["user"].values.tolist())) == 3
    names = ("brand", "age_level", "pvalue_level", "new_user_class_level")
    counts = {name: np.diff(ids[name].offsets).tolist() for name in names}
    # The ad of the first row has no brand, its user no profile; both profiles lack one value.
    assert counts["brand"] == [0, 1, 1]
    assert counts["age_level"] == [0, 1, 1]
    assert (counts["pvalue_level"], counts["new_user_class_level"]) == ([0, 0, 1], [0, 1, 0])


@pytest.mark.parametrize("name", ["train", "train__gz", "train__csv"])
def test_the_file_of_avazu_is_read_without_the_test_set(folder, name):
    folder("avazu", **{name: AVAZU, "test__gz": "id,hour\n", "sampleSubmission__gz": "id,click\n"})
    schema, batch = rows_of("avazu_file")
    assert len(schema.id_features) == 22
    assert batch.labels[:, 0].tolist() == [0.0, 1.0]
    assert batch.id_features["hour_of_day"].values.tolist() == [0, 23]
    assert batch.day.tolist() == [(day - date(1970, 1, 1)).days for day in (date(2014, 10, 21), date(2014, 10, 30))]
    assert batch.id_features["C20"].values[0] != batch.id_features["C20"].values[1]  # -1 is an id.


@pytest.mark.parametrize("name", ["train__txt", "train__txt__gz", "day_0", "day_23__gz"])
def test_the_files_of_criteo_are_read_without_the_test_set(folder, name):
    folder("criteo", **{name: CRITEO, "test__txt": "no labels here\n", "readme__txt": "a dataset\n"})
    schema, batch = rows_of("criteo_file")
    assert (len(schema.id_features), len(schema.dense_features)) == (26, 13)
    assert batch.labels[:, 0].tolist() == [0.0, 1.0]
    np.testing.assert_allclose(batch.dense[:, 1], [np.log(2.0), 0.0], rtol=1e-6)  # Counts can be negative,
    assert batch.dense[:, 11].tolist() == [0.0, 0.0]  # or missing.
    assert len(batch.id_features["C22"].values) == 0
    assert batch.id_features["C1"].values[0] == batch.id_features["C1"].values[1]


def test_days_of_terabyte_are_in_order_and_archives_are_not_read_twice(folder):
    one, two = CRITEO.splitlines(keepends=True)
    folder("criteo", day_2=one, day_10__gz=two)
    labels = np.concatenate([batch.labels for batch in public_files.criteo(8)[1]])
    assert labels[:, 0].tolist() == [0.0, 1.0]
    folder("avazu", train__gz=AVAZU, train__csv=AVAZU, train=AVAZU)
    assert sum(map(len, public_files.avazu(8)[1])) == 2


def test_a_directory_without_the_files_is_an_error_that_names_them(folder):
    for source, name, file in (
        ("criteo_file", "criteo", r"train\.txt or day_0"),
        ("avazu_file", "avazu", r"train or train\.csv"),
        ("taobao_file", "taobao_ad", r"ad_feature\.csv"),
    ):
        folder(name)
        with pytest.raises(DataError, match=file):
            list(paper_runs.SOURCES[source](100, 0)[1])


def test_table_2_trains_on_the_files(folder, monkeypatch):
    monkeypatch.setenv("PERSIA_PROCESSES", "1")
    lines = [AVAZU.splitlines(keepends=True)[1 + n % 2] for n in range(2_048)]
    folder("avazu", train__gz=AVAZU.splitlines(keepends=True)[0] + "".join(lines))
    paper_runs.dataset.cache_clear()
    found = list(paper.table2("smoke", source="avazu_file", network="ffnn"))
    paper_runs.dataset.cache_clear()
    assert {one.details["paper"]["hybrid"] for one in found} == {0.7793}
    assert {one.details["train_rows"] for one in found} == {1_024}


def test_data_that_are_not_here_say_where_to_get_them(folder, capsys):
    for source, name in public_files.DIRECTORIES.items():
        assert list(paper.table2("smoke", source=source, network="ffnn")) == []
        assert capsys.readouterr().err.startswith(f"{name} is not here")
