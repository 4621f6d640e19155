"""A running server by its URL: what the subcommands ask of it, and in one line why it does not answer."""

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
from urllib.request import ProxyHandler, Request, build_opener, getproxies, proxy_bypass

import orjson

from . import COUNTING_PERIOD, PATH

API_KEY, ADMIN_API_KEY = "SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY"
"""The environment variables of --api-key's and --admin-api-key's defaults."""
TIMEOUT = 60.0
"""Seconds: a scheduler answers between two steps, of which a long prefill can be one."""
SWITCH_TIMEOUT = 1800.0
"""The same for a switch, which may capture all CUDA graphs again; twice, if the first capture fails."""
SERVER = "uvicorn"
"""The header `Server` of SGLang's answers."""


class PolicyError(RuntimeError):
    """Why nothing was told or changed, in one line. `status` is that of the server's answer, None without one."""

    def __init__(self, line: str, status: int | None = None) -> None:
        super().__init__(" ".join(line.split()))
        self.status = status


def add_server(parser: argparse.ArgumentParser, needs: str, admin: bool = True) -> None:
    """Add a server's URL with its flags, --api-key, and --admin-api-key for a subcommand that changes what it does."""
    parser.add_argument("url", metavar="URL", help=f"of a server with {needs}, such as http://127.0.0.1:30000")
    parser.add_argument("--api-key", metavar="KEY", help=f"the server's (default: ${API_KEY})")
    if admin:
        text = f"the server's, where it has one (default: ${ADMIN_API_KEY}, else the API key)"
        parser.add_argument("--admin-api-key", metavar="KEY", help=text)


def find_keys(arguments: argparse.Namespace) -> tuple[str | None, str | None]:
    """The API key and the admin key, by flag or environment; None for one that is not given."""
    admin = getattr(arguments, "admin_api_key", None)
    return arguments.api_key or os.environ.get(API_KEY), admin or os.environ.get(ADMIN_API_KEY)


class Client:
    """Asks one server: changes with the admin key where one is given, all else with the API key. Methods raise
    `PolicyError` for a refusal, and where no server answers.
    """

    def __init__(self, url: str, api_key: str | None = None, admin_api_key: str | None = None) -> None:
        try:
            is_url = re.match(r"https?://[^/]", url) and urlsplit(url).port != 0
        except ValueError:  # a port beyond 65535
            is_url = False
        if not is_url:
            raise PolicyError(f"{url}: no URL; allowed is one such as http://127.0.0.1:30000, its port 1 to 65535")
        self.url = url.rstrip("/")
        self._key, self._admin_key = api_key, admin_api_key or api_key
        self._proxy = find_proxy(url)
        scheme = urlsplit(url).scheme
        self._opener = build_opener(ProxyHandler({} if self._proxy is None else {scheme: self._proxy}))
        self._answered_by = ""

    def get_policy(self) -> dict[str, Any]:
        """Return what GET /expert_policy answers, with counters that are no older than this call: if another client has
        asked less than `COUNTING_PERIOD` seconds ago, wait for the rest of that time and ask again.
        """
        answer = self._check(self.ask(PATH))
        if ago := answer.get("counted_ago"):
            time.sleep(max(COUNTING_PERIOD - ago, 0) + 0.01)
            answer = self._check(self.ask(PATH))
        return answer

    def set_policy(self, policy: dict[str, Any]) -> dict[str, Any]:
        """What POST /expert_policy answers."""
        return self._check(self.ask(PATH, policy, SWITCH_TIMEOUT, admin=True))

    def flush(self) -> None:
        """Forget cached prompts: they hold keys and values that another policy computed."""
        self.read("/flush_cache", {}, admin=True)

    def ask(
        self, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT, *, admin: bool = False
    ) -> Any:
        """The JSON that the server answers to GET, or to POST of a body; `admin` for a route of its admin key."""
        text = self.read(path, body, timeout, admin=admin)
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            reason = f"no answer in JSON ({error}); the URL must be that of a server"
            raise PolicyError(f"{self.url}: {reason}{self._answered_by}") from None

    def read(
        self, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT, *, admin: bool = False
    ) -> bytes:
        """What the server answers, as it is."""
        try:
            data = None if body is None else orjson.dumps(body)
        except TypeError as error:  # an integer beyond 64 bits
            raise PolicyError(f"{self.url}: cannot be sent: {error}; allowed are numbers of 64 bits") from None
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
            raise PolicyError(f"{self.url}: not an SGLang server with this package{self._answered_by}")
        return answer


def find_proxy(url: str) -> str | None:
    """Return the proxy that the environment names for `url`; None for an address of this machine, which no proxy of
    another machine can reach.
    """
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
    """Return who sent an answer, for the end of an error line; empty if the sender may be SGLang itself."""
    name = str(headers.get("Server", ""))[:80] if headers is not None else ""
    named = f"; answered by {name}" if name and name != SERVER else ""
    return named + _describe_proxy(proxy)


def _describe_proxy(proxy: str | None) -> str:
    if proxy is None:
        return ""
    shown = re.sub(r"//[^/@]*@", "//", proxy)  # without a password
    return f"; asked through the proxy {shown} of the environment, which no_proxy turns off for a host"


def _explain(error: HTTPError, admin: bool) -> str:
    if error.code in (401, 403):
        key = "--admin-api-key with the server's, or --api-key where it has none" if admin else "the server's --api-key"
        return f"{error.code}: no permission; allowed is {key}"
    if error.code == 404:
        return "404: no such route; allowed is a server with this package and its patches"
    try:
        text = error.read()
    except (OSError, HTTPException):
        text = b""
    try:
        answer = orjson.loads(text)
        told = answer.get("error", answer.get("message"))
        # SGLang's own routes answer {"error": {"message": ...}}, ours {"error": ...}.
        told = told.get("message", told) if isinstance(told, dict) else told
    except (ValueError, AttributeError):
        told = None
    return str(told)[:300] if told else f"{error.code} {error.reason} {text[:300].decode(errors='replace')}"
