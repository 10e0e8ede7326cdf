"""Calls to one SGLang server: bounded concurrency, and one clear error where the server refuses."""

import asyncio
import http.client
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson


class ServerLost(ConnectionError):
    """The connection broke before an answer came: the server died or is dying."""


class Refused(RuntimeError):
    """The server answered with an error; the message is its own."""


_JSON = {"Content-Type": "application/json"}
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, asyncio.IncompleteReadError, ConnectionError)


async def post_all(url: str, path: str, bodies: Sequence[dict[str, Any]], *, max_calls: int) -> list[Any]:
    """One POST a body, at most `max_calls` at once. Answers in order; a lost one is its ServerLost, not raised, so that
    the others are kept."""
    limit = asyncio.Semaphore(max_calls)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)  # a long generation is no fault
    connector = aiohttp.TCPConnector(limit=max_calls)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=2**20) as session:

        async def one(body: dict[str, Any]) -> Any:
            async with limit:
                try:
                    return await _post(session, url + path, body)
                except _LOST as error:
                    return ServerLost(f"{url}{path}: {error!r}")

        return await asyncio.gather(*(one(body) for body in bodies))


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with session.post(url, data=orjson.dumps(body), headers=_JSON) as response:
        return _value(url, response.status, response.content_type, await response.read())


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """One POST over a plain connection: a weight push is a few of them, and an event loop for each costs more than the
    server's answer. Raises ServerLost or Refused."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    try:
        connection.request("POST", path, orjson.dumps(body), _JSON)
        response = connection.getresponse()
        raw = response.read()
    except (http.client.HTTPException, OSError) as error:
        raise ServerLost(f"{url}{path}: {error!r}") from error
    finally:
        connection.close()
    return _value(url + path, response.status, response.headers.get_content_type(), raw)


def _value(url: str, status: int, content_type: str, raw: bytes) -> Any:
    if status != 200:
        raise Refused(f"{url} answered {status}: {raw[:2000].decode(errors='replace')}")
    # orjson: answers with routed experts have tens of megabytes; the standard parser costs a tenth of a rollout.
    return orjson.loads(raw) if content_type == "application/json" else raw.decode()
