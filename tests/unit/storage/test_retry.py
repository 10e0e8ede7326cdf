import errno

import httpx
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError

from storage.retry import StoreError, is_transient, with_retries


def client_error(code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


def http_error(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "https://example.org")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status, request=request))


def caused_by(cause: Exception) -> RuntimeError:
    error = RuntimeError("wrapped")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError(errno.EBUSY, "SlowDown"), True),
        (EndpointConnectionError(endpoint_url="http://x"), True),
        (ReadTimeoutError(endpoint_url="http://x"), True),
        (client_error("InternalError", 500), True),
        (client_error("TooManyRequests", 429), True),
        (http_error(503), True),
        (httpx.ConnectError("refused"), True),
        (caused_by(ConnectionResetError()), True),
        (client_error("AccessDenied", 403), False),
        (client_error("NoSuchKey", 404), False),
        (http_error(404), False),
        (NoCredentialsError(), False),
        (PermissionError(), False),
        (FileNotFoundError(), False),
        (OSError(errno.ENOSPC, "disk full"), False),
        (ValueError("batch size"), False),
        (StoreError("wrong endpoint"), False),
        (caused_by(ValueError()), False),
    ],
)
def test_what_may_pass(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient


@pytest.mark.parametrize(("failures", "calls"), [(0, 1), (2, 3), (3, 3)])
def test_retries_while_transient(failures: int, calls: int) -> None:
    seen = []

    def operation() -> str:
        seen.append(1)
        if len(seen) <= failures:
            raise ConnectionResetError("reset")
        return "done"

    if failures == 3:
        with pytest.raises(ConnectionResetError):
            with_retries(operation, "op", attempts=3, first_delay=0)
    else:
        assert with_retries(operation, "op", attempts=3, first_delay=0) == "done"
    assert len(seen) == calls


def test_lasting_fault_is_not_retried() -> None:
    seen = []

    def operation() -> None:
        seen.append(1)
        raise PermissionError("denied")

    with pytest.raises(PermissionError):
        with_retries(operation, "op", first_delay=0)
    assert len(seen) == 1
