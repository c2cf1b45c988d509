"""Idempotency keys: the same key with the same body is the same request, whoever lost the answer."""

import hashlib
import json

from pydantic import BaseModel

from overnight.core.errors import KeyReusedError


def fingerprint(request: BaseModel) -> str:
    """A hash of everything in a request but its key and whether it is only a rehearsal."""
    body = request.model_dump(mode="json", exclude={"key", "dry_run"})
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def key_reused(key: str) -> KeyReusedError:
    """A key came back with another body."""
    return KeyReusedError(
        f"the key {key[:200]!r} was used before with another body",
        hint="Use a fresh key for each request; repeat the body exactly when you retry.",
    )
