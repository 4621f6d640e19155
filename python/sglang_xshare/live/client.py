"""A client of a running server, which the subcommands use. Every error message is one line."""

import argparse
import ipaddress
import os
import re
import time
from email.message import Message
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener, getproxies, proxy_bypass

import orjson

from . import COUNTING_PERIOD, PATH

API_KEY, ADMIN_API_KEY = "SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY"
"""The environment variables that contain the defaults of --api-key and --admin-api-key."""
TIMEOUT = 60.0
"""The timeout of a request in seconds. A scheduler answers between two steps, and a long prefill is one step."""
SWITCH_TIMEOUT = 1800.0
"""The timeout of a switch in seconds. The server may capture all CUDA graphs. If the capture fails, the server captures
the previous graphs again.
"""
SERVER = "uvicorn"
"""The value of the header `Server` in SGLang's answers."""


class PolicyError(RuntimeError):
    """The error of a failed request. Its message is one line.

    `status` is the HTTP status of the server's answer, or None if there was no answer.
    """

    def __init__(self, line: str, status: int | None = None) -> None:
        super().__init__(" ".join(line.split()))
        self.status = status


class _NoRedirects(HTTPRedirectHandler):
    """A handler that follows no redirect. urllib would replace POST by GET, and send the key to another host."""

    def redirect_request(self, *args: Any) -> None:
        """Return None, so the opener raises `HTTPError`."""


def add_server(parser: argparse.ArgumentParser, needs: str, admin: bool = True) -> None:
    """Add the arguments for a server's URL and --api-key. With `admin`, also add --admin-api-key."""
    parser.add_argument("url", metavar="URL", help=f"of a server with {needs}, such as http://127.0.0.1:30000")
    parser.add_argument("--api-key", metavar="KEY", help=f"the server's (default: ${API_KEY})")
    if admin:
        text = f"the server's, if it has one (default: ${ADMIN_API_KEY}, else the API key)"
        parser.add_argument("--admin-api-key", metavar="KEY", help=text)


def find_keys(arguments: argparse.Namespace) -> tuple[str | None, str | None]:
    """Return the API key and the admin key from the flags or the environment. A key that is not given is None."""
    admin = getattr(arguments, "admin_api_key", None)
    return arguments.api_key or os.environ.get(API_KEY), admin or os.environ.get(ADMIN_API_KEY)


class Client:
    """A client of one server. Its methods raise `PolicyError` if the server refuses a request or does not answer.

    Requests that change the server use the admin key, if there is one. All other requests use the API key.
    """

    def __init__(self, url: str, api_key: str | None = None, admin_api_key: str | None = None) -> None:
        try:
            is_url = re.match(r"https?://[^/]", url) and urlsplit(url).port != 0
        except ValueError:  # a port beyond 65535
            is_url = False
        if not is_url:
            raise PolicyError(f"{url}: must be a URL such as http://127.0.0.1:30000, with a port from 1 to 65535")
        self.url = url.rstrip("/")
        if not all(key.isascii() and key.isprintable() for key in (api_key or "", admin_api_key or "")):
            raise PolicyError("--api-key and --admin-api-key must be printable ASCII")  # an error must not print a key
        self._key, self._admin_key = api_key, admin_api_key or api_key
        self._proxy = find_proxy(url)
        scheme = urlsplit(url).scheme
        self._opener = build_opener(ProxyHandler({} if self._proxy is None else {scheme: self._proxy}), _NoRedirects)
        self._answered_by = ""

    def get_policy(self) -> dict[str, Any]:
        """Return the answer to GET /expert_policy, with counters that are not older than this call.

        The server reads its counters at most once in `COUNTING_PERIOD` seconds. If the answer contains older counters,
        wait until the server can read them again, and repeat GET.
        """
        answer = self._check(self.ask(PATH))
        if ago := answer.get("counted_ago"):
            time.sleep(max(COUNTING_PERIOD - ago, 0) + 0.01)
            answer = self._check(self.ask(PATH))
        return answer

    def set_policy(self, policy: dict[str, Any]) -> dict[str, Any]:
        """Switch the server to `policy` with POST /expert_policy. Return the server's answer."""
        return self._check(self.ask(PATH, policy, SWITCH_TIMEOUT, admin=True))

    def flush(self) -> None:
        """Flush the server's prefix cache, because its keys and values may be from another policy."""
        self.read("/flush_cache", {}, admin=True)

    def ask(
        self, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT, *, admin: bool = False
    ) -> Any:
        """Send GET, or POST if there is a `body`, and return the JSON answer. With `admin`, use the admin key."""
        text = self.read(path, body, timeout, admin=admin)
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            reason = f"no answer in JSON ({error}); the URL must be that of a server"
            raise PolicyError(f"{self.url}: {reason}{self._answered_by}") from None

    def read(
        self, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT, *, admin: bool = False
    ) -> bytes:
        """Send a request like `ask`, but return the answer as bytes."""
        try:
            data = None if body is None else orjson.dumps(body)
        except TypeError as error:  # an integer beyond 64 bits
            raise PolicyError(f"{self.url}: cannot be sent: {error}; integers must have at most 64 bits") from None
        headers, key = {"Content-Type": "application/json"}, self._admin_key if admin else self._key
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            with self._opener.open(Request(self.url + path, data, headers), timeout=timeout) as response:
                self._answered_by = describe_sender(response.headers, self._proxy)
                return bytes(response.read())
        except HTTPError as error:
            sender = describe_sender(error.headers, self._proxy)
            raise PolicyError(f"{self.url}: {_explain(error, admin)}{sender}", error.code) from None
        except (URLError, OSError, HTTPException, ValueError) as error:
            reason = f"no answer ({getattr(error, 'reason', error)}); the URL must be that of a running server"
            raise PolicyError(f"{self.url}: {reason}{_describe_proxy(self._proxy)}") from None

    def _check(self, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict) or "in_force" not in answer:
            raise PolicyError(f"{self.url}: must be an SGLang server with this package{self._answered_by}")
        return answer


def find_proxy(url: str) -> str | None:
    """Return the proxy that the environment sets for `url`, or None. localhost and loopback addresses have no proxy."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        address = ipaddress.ip_address(host)
        is_here = address.is_loopback or address.is_unspecified
    except ValueError:
        is_here = host == "localhost" or host.endswith(".localhost")
    if is_here or proxy_bypass(parts.netloc.rpartition("@")[2]):  # no_proxy may name a port
        return None
    return getproxies().get(parts.scheme)


def describe_sender(headers: Message | None, proxy: str | None) -> str:
    """Return the last part of an error line. It names the sender of the answer and the proxy.

    The sender is omitted if it is SGLang's web server. The proxy is omitted if there is none.
    """
    name = str(headers.get("Server", ""))[:80] if headers is not None else ""
    named = f"; answered by {name}" if name and name != SERVER else ""
    return named + _describe_proxy(proxy)


def _describe_proxy(proxy: str | None) -> str:
    if proxy is None:
        return ""
    shown = re.sub(r"//[^/@]*@", "//", proxy)  # without a password
    return f"; asked through the proxy {shown} of the environment; to bypass it for a host, set no_proxy"


def _explain(error: HTTPError, admin: bool) -> str:
    if error.code in (401, 403):
        key = "--admin-api-key, or --api-key for a server without an admin key," if admin else "--api-key"
        return f"{error.code}: no permission; {key} must be the server's"
    if 300 <= error.code < 400:
        location = str(error.headers.get("Location", ""))[:200]
        return f"{error.code}: redirected to {location}; the URL must be the server's own"
    if error.code == 404:
        return "404: no such route; the server must have this package and its patches"
    try:
        text = error.read()
    except (OSError, HTTPException):
        text = b""
    try:
        answer = orjson.loads(text)
        told = answer.get("error", answer.get("message"))
        # SGLang's own routes answer {"error": {"message": ...}}, and our routes answer {"error": ...}.
        told = told.get("message", told) if isinstance(told, dict) else told
    except (ValueError, AttributeError):
        told = None
    return str(told)[:300] if told else f"{error.code} {error.reason} {text[:300].decode(errors='replace')}"
