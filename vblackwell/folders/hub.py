"""Hub ids ``owner/name``: from huggingface_hub's cache, or fetched, and refused at once where there is no network.

huggingface_hub tries for half a minute before it says that it cannot reach its hub, so this asks first whether anything
answers there. Nothing here needs torch, so that ``vb`` can refuse an id before it imports that.
"""

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from vblackwell.errors import ConfigurationError, CorruptData

ANSWER_SECONDS = 1.0  # for the hub, or the proxy before it, to accept a connection
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(model: str) -> bool:
    return _ID.fullmatch(model) is not None


def find_config(model: str) -> Path:
    """The config.json of a hub id; no weights are fetched for it. Raises ConfigurationError as `cached_or_fetched`."""
    from huggingface_hub import hf_hub_download

    return Path(cached_or_fetched(model, partial(hf_hub_download, model, "config.json")))


def check_reachable(model: str) -> None:
    """Raises ConfigurationError where ``model`` can be nothing but a hub id of which the cache has no config.json, and
    the hub cannot be reached."""
    if not is_hub_id(model) or Path(model).exists():
        return
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):  # such an id is told of where it is fetched
        if not isinstance(try_to_load_from_cache(model, "config.json"), str) and (why := _offline()) is not None:
            raise _refused(model, why)


def cached_or_fetched(model: str, fetch: Callable[..., Any], **options: Any) -> Any:
    """What ``fetch`` finds in the cache, or with ``options`` on the hub. Raises ConfigurationError, with a remedy."""
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    # What is not in the cache, or in part, is downloaded; an id that cannot be one is told of there.
    cached = ""
    try:
        return fetch(local_files_only=True)
    except (EntryNotFoundError, HFValidationError):
        pass
    except (ConfigurationError, CorruptData) as error:
        cached = f"{error}; "  # what is there is of use, and what it lacks
    if (why := _offline()) is not None:
        raise _refused(model, cached + why)
    try:
        return fetch(**options)
    except (EntryNotFoundError, OSError, ValueError, CorruptData) as error:
        raise _refused(model, (str(error).strip() or type(error).__name__).splitlines()[0]) from error


def _refused(model: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{model}: no such folder, not whole in huggingface_hub's cache, and not to be downloaded ({why}). Where there "
        f"is a network run `hf download {model} --local-dir DIR`, bring DIR here and give it instead; or check the id"
    )


def _offline() -> str | None:
    """Why nothing can be fetched; None where something accepts a connection."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set: unset it to download"
    hub = urlsplit(constants.ENDPOINT)
    proxy = None if proxy_bypass(hub.hostname or "") else getproxies().get(hub.scheme) or getproxies().get("all")
    asked = hub if proxy is None else urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port, answered = asked.port or (443 if asked.scheme == "https" else 80), threading.Event()

    def ask() -> None:
        with suppress(OSError):
            socket.create_connection((asked.hostname or "", port), ANSWER_SECONDS).close()
            answered.set()

    # A name server that does not answer has no time limit of ours: that thread is left behind.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS * 1.2)
    return None if answered.is_set() else f"no network: {asked.hostname} cannot be reached"
