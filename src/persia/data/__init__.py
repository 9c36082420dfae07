"""Readers of files, public data sets and synthetic data; they yield `persia.Batch`.

A reader is any object that satisfies `Reader`. Any iterable of batches can be trained on, but only a reader can be
resumed. pyarrow and fsspec are imported on first use.
"""

from persia.data.datasets.adult import adult
from persia.data.datasets.amazon import amazon
from persia.data.datasets.avazu import avazu
from persia.data.datasets.criteo import criteo
from persia.data.datasets.diginetica import diginetica
from persia.data.datasets.globo import globo
from persia.data.datasets.kuairand import kuairand
from persia.data.datasets.mind import mind
from persia.data.datasets.movielens import movielens
from persia.data.datasets.taobao import taobao
from persia.data.days import Span, days
from persia.data.event_log import event_log
from persia.data.files import File, expand, find
from persia.data.from_arrow import arrow
from persia.data.from_csv import csv
from persia.data.from_jsonl import jsonl
from persia.data.from_parquet import parquet
from persia.data.generator import Synthetic, synthetic
from persia.data.item_catalogs import ItemCatalog, item_catalog
from persia.data.loader import Loader
from persia.data.negative_sampling import NegativeSampling
from persia.data.negatives import negatives, shared_negatives
from persia.data.reader import Order, Reader, RowSource, StreamReader
from persia.data.row_options import ColumnOptions, ReaderOptions, RowOptions
from persia.data.selection import Split
from persia.data.semantic_ids import SemanticIds, read_semantic_ids, semantic_ids, write_semantic_ids
from persia.data.shared_sampling import SharedNegatives
from persia.data.streams.directories import growing
from persia.data.streams.events import EventBatches, KeyedEvents
from persia.data.streams.joining import JoinedStream, join
from persia.data.streams.kafka import kafka
from persia.types import SourceFingerprint, SourcePart

__all__ = [
    "ColumnOptions",
    "EventBatches",
    "File",
    "ItemCatalog",
    "JoinedStream",
    "KeyedEvents",
    "Loader",
    "NegativeSampling",
    "Order",
    "Reader",
    "ReaderOptions",
    "RowOptions",
    "RowSource",
    "SemanticIds",
    "SharedNegatives",
    "SourceFingerprint",
    "SourcePart",
    "Span",
    "Split",
    "StreamReader",
    "Synthetic",
    "adult",
    "amazon",
    "arrow",
    "avazu",
    "criteo",
    "csv",
    "days",
    "diginetica",
    "event_log",
    "expand",
    "find",
    "globo",
    "growing",
    "item_catalog",
    "join",
    "jsonl",
    "kafka",
    "kuairand",
    "mind",
    "movielens",
    "negatives",
    "parquet",
    "read_semantic_ids",
    "semantic_ids",
    "shared_negatives",
    "synthetic",
    "taobao",
    "write_semantic_ids",
]
