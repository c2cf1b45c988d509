"""The few calls of `up`, `down` and `doctor` to the server; on the standard library, so that they start at once."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from overnight.core.settings import Settings
from overnight.platform.identity import Holder
from overnight.platform.server.tokens import read_token

TIMEOUT_SECONDS = 5.0


class Switchboard:
    """Calls the server of a home; every failure but that of the token is the answer None."""

    def __init__(self, settings: Settings) -> None:
        self._home = settings.paths

    def health(self) -> dict[str, Any] | None:
        """What ``/v1/health`` says; it asks for no token."""
        return self._call("GET", "/v1/health")

    def shutdown(self) -> int | None:
        """Tells every worker to save and leave, and that nothing is to start; the number of those still there.

        Raises:
            BadTokenFileError: The home's token cannot be read.
        """
        token = read_token(self._home.token_file)
        answer = self._call("POST", "/v1/shutdown", {"reason": "shutdown"}, token)
        return int(answer.get("live", 0)) if answer is not None else None

    def _call(self, method: str, path: str, body: Any = None, token: str | None = None) -> dict[str, Any] | None:
        try:
            found = Holder.parse(self._home.server_file.read_bytes())
            url = urlsplit(str(found.facts["url"]) if found else "")
            headers = {"Connection": "close"}
            if token is not None:
                headers["Authorization"] = f"Bearer {token}"
            connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=TIMEOUT_SECONDS)
            try:
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                response = connection.getresponse()
                data = json.loads(response.read())
            finally:
                connection.close()
        except (OSError, ValueError, KeyError, http.client.HTTPException):
            return None
        return data if response.status == 200 and isinstance(data, dict) else None
