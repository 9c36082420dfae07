"""Training with a Lightning `Trainer`, in one process; needs `pip install "persia-recsys[lightning]"`."""

from persia.errors import MissingExtraError

try:
    import lightning.pytorch  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        'persia.interop.lightning needs Lightning: pip install "persia-recsys[lightning]".'
    ) from error

from persia.interop.lightning.callback import PersiaCallback
from persia.interop.lightning.module import RecommenderModule
from persia.interop.lightning.prefetch_loader import PrefetchLoader

__all__ = ["PersiaCallback", "PrefetchLoader", "RecommenderModule"]
