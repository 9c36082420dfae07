"""Names the packages that file systems of URLs need."""

from __future__ import annotations

from persia.errors import MissingExtraError

__all__ = ["missing_package"]

_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "webhdfs": "webhdfs",
}
"""Extra of persia by protocol. hdfs:// needs pyarrow, which is always installed, and Hadoop's libhdfs."""


def missing_package(url: str, error: ImportError) -> MissingExtraError:
    """Returns the error for a URL whose file system fsspec cannot import."""
    protocol = url.partition("://")[0]
    extra = _EXTRAS.get(protocol)
    remedy = f'pip install "persia-recsys[{extra}]"' if extra else f"the package that fsspec asks for ({error})"
    return MissingExtraError(f"{url}: {protocol}:// needs {remedy}.", path=url)
