"""Networks for click-through and similar predictions: plain modules from dense features and embeddings to logits."""

from persia.nn.models.dcn import DCNv2
from persia.nn.models.deepfm import DeepFM
from persia.nn.models.dien import DIEN
from persia.nn.models.din import DIN
from persia.nn.models.dlrm import DLRM
from persia.nn.models.ffnn import FFNN
from persia.nn.models.final_mlp import FinalMLP
from persia.nn.models.hstu import HSTU
from persia.nn.models.mask_net import MaskNet
from persia.nn.models.multi_task import PLE, MMoE
from persia.nn.models.next_item import NextItem
from persia.nn.models.sasrec import SASRec
from persia.nn.models.two_tower import TwoTower
from persia.nn.models.youtube_dnn import YouTubeDNN

__all__ = [
    "DIEN",
    "DIN",
    "DLRM",
    "FFNN",
    "HSTU",
    "PLE",
    "DCNv2",
    "DeepFM",
    "FinalMLP",
    "MMoE",
    "MaskNet",
    "NextItem",
    "SASRec",
    "TwoTower",
    "YouTubeDNN",
]
