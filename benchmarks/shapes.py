"""Synthetic click logs in the shape of Criteo, Avazu and Taobao: fields, numbers of ids, skew, and rate of clicks.

Only the shape is theirs. The click probabilities are those of `persia.data.synthetic`, so the best AUC is known and is
not the real set's (200,000 rows, seed 0: 0.832, 0.823 and 0.868), and the ids of a row are independent of each other.

Numbers of ids, rows and clicks have a source, named at each set. Exponents come from two places:

- `top`, the published share of rows of a field's most frequent id. The exponent is the one at which a Zipf distribution
  over all ids gives its first id that share. It fits the head alone: Avazu's device_id has one value (unset) in 82.5 %
  of the rows and the next in 0.05 %, where the fitted distribution has 10.7 %.
- `assumed`, where no source gives a share. These values are not verified: state them beside any result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from persia import data

__all__ = ["AVAZU", "CRITEO", "SHAPES", "TAOBAO", "Field", "Shape", "fitted_exponent"]

KEPT = 10_000
"""Numbers of ids up to this stay as they are in a smaller log; above it they shrink with the rows."""


@dataclass(frozen=True)
class Field:
    """An id feature.

    Args:
        name: name in the real set.
        ids: number of distinct ids there.
        top: share of the rows with the most frequent id, or None if no source gives it.
        assumed: exponent without `top`; not verified.
    """

    name: str
    ids: int
    top: float | None = None
    assumed: float = 1.1

    @cached_property
    def exponent(self) -> float:
        """The Zipf exponent: fitted to `top`, else `assumed`."""
        return self.assumed if self.top is None else fitted_exponent(self.ids, self.top)


@dataclass(frozen=True)
class Shape:
    """The shape of a click log.

    Args:
        name: name of the set.
        rows: rows of the real set.
        positive_rate: share of clicks there.
        dense: number of dense features.
        fields: id features, in the real set's order.
    """

    name: str
    rows: int
    positive_rate: float
    dense: int
    fields: tuple[Field, ...]

    def ids(self, rows: int) -> list[int]:
        """Returns the number of ids of each field in a log of `rows` rows.

        Numbers above `KEPT` shrink as the rows do, so that an id is met about as often as in the real set. With the
        real number of ids and few rows, most ids of the large fields would be met once.
        """
        part = min(rows / self.rows, 1.0)
        return [field.ids if field.ids <= KEPT else max(KEPT, round(field.ids * part)) for field in self.fields]

    def reader(self, rows: int, **options: Any) -> data.Synthetic:
        """Returns a generator of `rows` rows; `options` are further arguments of `data.synthetic`."""
        return data.synthetic(
            rows,
            id_features=len(self.fields),
            ids_per_feature=self.ids(rows),
            zipf=[field.exponent for field in self.fields],
            dense_features=self.dense,
            positive_rate=self.positive_rate,
            **options,
        )


def fitted_exponent(ids: int, top: float) -> float:
    """Returns the exponent s at which the first of `ids` Zipf ranks has the share `top`: 1 / sum of k ** -s."""
    low, high = 0.0, 16.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if 1 / _harmonic(ids, middle) < top:
            low = middle
        else:
            high = middle
    return low


def _harmonic(n: int, exponent: float) -> float:
    """Returns the sum of k ** -exponent for k = 1 to n; beyond 100,000 by an integral."""
    exact = min(n, 100_000)
    total = float((np.arange(1, exact + 1) ** -exponent).sum())
    if n > exact:
        low, high, power = exact + 0.5, n + 0.5, 1 - exponent
        total += np.log(high / low) if abs(power) < 1e-9 else (high**power - low**power) / power
    return total


# Criteo Display Advertising Challenge (Kaggle 2014). Numbers of ids and C1's share: GitHub macks22/ctr-prediction,
# categorical-features.md; the same numbers of ids in real-zhangzhe/wukong, NUM_SPARSE_EMBS. Rows and clicks:
# class counts in public code that trains on the set. All exponents but C1's are assumed.
_CRITEO_IDS = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27, 14_992, 5_461_306,
    10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
CRITEO = Shape(
    "criteo",
    45_840_617,
    11_745_438 / 45_840_617,
    13,
    tuple(Field(f"C{i}", ids, 0.5011 if i == 1 else None) for i, ids in enumerate(_CRITEO_IDS, 1)),
)

# Avazu Click-Through Rate Prediction (Kaggle 2014), the 10 days of train. Clicks and rows of the most frequent ids:
# GitHub TLX-CTR-Algorithm/CTR, its page on feature engineering (value counts of the whole file). Numbers of ids: public
# code that trains on the set (NUM_EMBEDDINGS_PER_FEATURE of a torchrec reader), which agrees with that page. Exponents
# of C14 and C17 to C21 are assumed.
_AVAZU_ROWS = 40_428_967
AVAZU = Shape(
    "avazu",
    _AVAZU_ROWS,
    6_865_066 / _AVAZU_ROWS,
    0,
    (
        Field("hour", 240, 447_783 / _AVAZU_ROWS),
        Field("C1", 7, 37_140_632 / _AVAZU_ROWS),
        Field("banner_pos", 7, 29_109_590 / _AVAZU_ROWS),
        Field("site_id", 4_737, 14_596_137 / _AVAZU_ROWS),
        Field("site_domain", 7_745, 15_131_739 / _AVAZU_ROWS),
        Field("site_category", 26, 16_537_234 / _AVAZU_ROWS),
        Field("app_id", 8_552, 25_832_830 / _AVAZU_ROWS),
        Field("app_domain", 559, 27_237_087 / _AVAZU_ROWS),
        Field("app_category", 36, 26_165_592 / _AVAZU_ROWS),
        Field("device_id", 2_686_408, 33_358_308 / _AVAZU_ROWS),
        Field("device_ip", 6_729_486, 208_701 / _AVAZU_ROWS),
        Field("device_model", 8_251, 2_455_470 / _AVAZU_ROWS),
        Field("device_type", 5, 37_304_667 / _AVAZU_ROWS),
        Field("device_conn_type", 4, 34_886_838 / _AVAZU_ROWS),
        Field("C14", 2_626),
        Field("C15", 8, 37_708_959 / _AVAZU_ROWS),
        Field("C16", 9, 38_136_554 / _AVAZU_ROWS),
        Field("C17", 435),
        Field("C18", 4),
        Field("C19", 68),
        Field("C20", 172),
        Field("C21", 60),
    ),
)

# Taobao display advertising (Alimama; Tianchi data set 56): raw_sample joined with ad_feature and user_profile. Counts:
# GitHub xxren8218/Machine-learning, its page on preparing the data for a CTR model; the large fields' ids also in
# DeepRec-AI/HybridBackend, docs/tutorial/ranking/taobao/data/spec.json. The shares of pvalue_level and of
# new_user_class_level are of users, not of rows; "unknown" counts as an id there. The dense feature stands for
# the price. The other exponents are assumed.
_TAOBAO_USERS = 1_061_768  # with a profile
TAOBAO = Shape(
    "taobao",
    26_557_961,
    1_366_056 / 26_557_961,
    1,
    (
        Field("user", 1_141_729, assumed=0.6),  # 23 rows each on average
        Field("adgroup_id", 846_811, assumed=0.9),
        Field("cate_id", 6_769, assumed=0.9),
        Field("campaign_id", 423_436, assumed=0.9),
        Field("customer", 255_875, assumed=0.9),
        Field("brand", 99_815, assumed=0.9),
        Field("pid", 2, 16_472_898 / 26_557_961),
        Field("cms_segid", 97, assumed=0.9),
        Field("cms_group_id", 13, assumed=0.9),
        Field("final_gender_code", 2, assumed=0.9),
        Field("age_level", 7, assumed=0.9),
        Field("pvalue_level", 4, 575_917 / _TAOBAO_USERS),
        Field("shopping_level", 3, assumed=0.9),
        Field("occupation", 2, assumed=0.9),
        Field("new_user_class_level", 5, 344_920 / _TAOBAO_USERS),
    ),
)

SHAPES = {shape.name: shape for shape in (CRITEO, AVAZU, TAOBAO)}
