"""Faults that pass are tried again; faults of configuration and data are not."""

import botocore.exceptions
import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from prefect.states import Failed

from storage.retry import StoreError
from tasks.cache_key import CacheKeyError
from tasks.hub import HubError
from tasks.retries import passes_by_itself, retry_condition
from tasks.stage import MissingArtifactError


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class TransportError(Exception):
    """What the client library of the Hub calls its network errors, whichever copy of httpx it brings."""


class ReadTimeout(TransportError):
    pass


def hub_error(status: int) -> HfHubHTTPError:
    response = httpx.Response(status, request=httpx.Request("GET", "http://hub"))
    return HfHubHTTPError(f"status {status}", response=response)  # type: ignore[arg-type]


FAULTS = [
    (ConnectionResetError("gone"), True),
    (TimeoutError("slow"), True),
    (httpx.ConnectError("refused"), True),
    (ReadTimeout("slow"), True),
    (botocore.exceptions.EndpointConnectionError(endpoint_url="http://s3"), True),
    (hub_error(500), True),
    (hub_error(429), True),
    (hub_error(404), False),
    (caused(LocalEntryNotFoundError("not cached"), ReadTimeout("slow")), True),
    (caused(RuntimeError("stage"), ConnectionResetError("gone")), True),
    (HubError("gated"), False),
    (StoreError("damaged"), False),
    (caused(StoreError("damaged"), ConnectionResetError("gone")), False),
    (MissingArtifactError("convert"), False),
    (CacheKeyError("handle"), False),
    (ValueError("group_size 3"), False),
    (FileNotFoundError("prompts.jsonl"), False),
    (MemoryError(), False),
]


@pytest.mark.parametrize(("error", "again"), FAULTS, ids=lambda value: type(value).__name__)
def test_passes_by_itself(error: Exception, again: bool) -> None:
    assert passes_by_itself(error) is again


@pytest.mark.parametrize(("error", "again"), FAULTS, ids=lambda value: type(value).__name__)
def test_retry_condition_of_a_failed_state(error: Exception, again: bool) -> None:
    assert retry_condition(None, None, Failed(data=error)) is again
