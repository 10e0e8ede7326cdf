"""Which errors may pass by themselves, and a retry loop for those."""

import errno
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TRANSIENT_ERRNO = {
    errno.EAGAIN,
    errno.EBUSY,  # s3fs: SlowDown, ServiceUnavailable
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ESTALE,
    errno.ETIMEDOUT,
    getattr(errno, "EREMOTEIO", errno.ETIMEDOUT),  # s3fs: InternalError
}


class StoreError(ValueError):
    """A fault of storage that a retry does not cure; says what was found, the rule, and the option to set."""


def is_transient(error: BaseException) -> bool:
    """Whether a retry may help: timeouts, broken connections, throttling, HTTP 408, 429 and 5xx; in `error` itself or
    in one that caused it. A `StoreError` never passes by itself."""
    # Imported late: they take a while, and only a failure needs them.
    import aiohttp
    import botocore.exceptions as boto
    import httpx

    transient = (
        ConnectionError,
        TimeoutError,
        aiohttp.ClientConnectionError,
        aiohttp.ClientPayloadError,
        boto.ConnectionError,
        boto.HTTPClientError,
        boto.IncompleteReadError,
        boto.ResponseStreamingError,
        httpx.TransportError,
    )
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, StoreError | httpx.UnsupportedProtocol):
            return False
        if isinstance(seen, transient) or (isinstance(seen, OSError) and seen.errno in _TRANSIENT_ERRNO):
            return True
        status = _http_status(seen)
        if status is not None:
            return status in (408, 429) or status >= 500
        seen = seen.__cause__
    return False


def _http_status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore.ClientError
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    status = getattr(response, "status_code", getattr(error, "status", None))  # httpx, requests; aiohttp
    return status if isinstance(status, int) else None


def with_retries(operation: Callable[[], T], what: str, *, attempts: int = 5, first_delay: float = 0.5) -> T:
    """The result of `operation`, tried up to `attempts` times while its errors are transient.

    Waits `first_delay` seconds, then twice as long each time, with up to a quarter more at random so that many clients
    do not return at once.
    """
    for attempt in range(1, attempts):
        try:
            return operation()
        except Exception as error:
            if not is_transient(error):
                raise
            delay = first_delay * 2 ** (attempt - 1) * (1 + random.random() / 4)
            logger.warning("%s: %s; attempt %d of %d in %.1f s", what, error, attempt + 1, attempts, delay)
            time.sleep(delay)
    return operation()
