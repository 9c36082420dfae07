"""A list of batches that a later run recognises, as lists have no fingerprint of their own."""

import zlib

import persia


class Listed(list):
    """A list whose fingerprint is its content."""

    def fingerprint(self) -> str:
        content = 0
        for batch in self:
            if isinstance(batch, persia.Batch):
                for array in (*(column.values for column in batch.id_features.values()), batch.labels):
                    content = zlib.crc32(array.tobytes(), content)
        return f"{len(self)} batches, {content}"
