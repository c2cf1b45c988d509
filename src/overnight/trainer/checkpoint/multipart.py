"""Uploads in parts that S3 keeps, invisible and billed, until somebody completes or aborts them.

A driver sends large files in parts. If it is killed meanwhile, the parts stay for ever, and no listing of objects shows
them. Other stores forget such uploads by themselves after some days.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Upload:
    """An upload that was neither completed nor aborted.

    Attributes:
        bucket, key, number: What S3 calls it; ``number`` is its ``UploadId``.
        path: Of the file that it would become, relative to the folder that was asked for.
    """

    bucket: str
    key: str
    number: str
    path: str


def uploads_below(files: Any, folder: str) -> list[Upload]:
    """Uploads of files in a folder and below; none if the file system is not one of S3.

    Args:
        files: An fsspec file system.
        folder: As the file system wants it.

    Raises:
        OSError: The store does not answer, or refuses to tell.
    """
    if not hasattr(files, "call_s3"):
        return []
    bucket, key, _ = files.split_path(folder)
    prefix = f"{key.rstrip('/')}/" if key else ""
    found = (part for page in _pages(files, bucket, prefix) for part in page)
    return [Upload(bucket, one["Key"], one["UploadId"], one["Key"].removeprefix(prefix)) for one in found]


def _pages(files: Any, bucket: str, prefix: str) -> Iterator[list[dict[str, str]]]:
    markers: dict[str, str] = {}
    while True:
        answer = files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **markers)
        yield answer.get("Uploads", [])
        if not answer.get("IsTruncated"):
            return
        markers = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def abort(files: Any, upload: Upload) -> None:
    """Gives up an upload and frees its parts.

    Raises:
        FileNotFoundError: It is over.
        OSError: The store does not answer, or refuses.
    """
    files.call_s3("abort_multipart_upload", Bucket=upload.bucket, Key=upload.key, UploadId=upload.number)
