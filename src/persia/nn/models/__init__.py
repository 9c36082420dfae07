"""Networks for click-through and similar predictions: plain modules from dense features and embeddings to logits."""

from persia.nn.models.dcn import DCNv2
from persia.nn.models.deepfm import DeepFM
from persia.nn.models.dlrm import DLRM
from persia.nn.models.ffnn import FFNN

__all__ = ["DLRM", "FFNN", "DCNv2", "DeepFM"]
