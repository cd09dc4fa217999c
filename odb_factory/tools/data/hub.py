"""Downloads dataset files from the Hugging Face Hub with its own client, and resumes interrupted downloads.

On its own, the client (1.x) starts a file over in every new process, which is too slow for files of some gigabytes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

SECONDS = 5.0
"""How long the Hub may take to describe a file."""

TERMS = (
    "its owners ask you to accept their terms on its page of the Hugging Face Hub and to log in (`hf auth login`, or "
    "HF_TOKEN); do that and run again"
)
GONE = "it no longer exists, or needs a login (`hf auth login`, or HF_TOKEN)"


def hub_file(repository: str, name: str, revision: str | None, target: Path, instead: str) -> Path:
    """A file of a dataset: from `target` or the Hub's own cache if it is there, else downloaded into `target`.

    Args:
        instead: a sentence about what to do without the Hub.

    Raises:
        OSError: it cannot be downloaded; the message says why and what to do.
    """
    import httpx
    from huggingface_hub import errors as hub
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    path = target / Path(name).name
    if path.is_file():
        return path
    cached = try_to_load_from_cache(repository, name, repo_type="dataset", revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    try:
        url = hf_hub_url(repository, name, repo_type="dataset", revision=revision)
        return _fetch(url, get_hf_file_metadata(url, timeout=SECONDS), path)
    except hub.GatedRepoError:
        reason = TERMS
    except hub.OfflineModeIsEnabled:
        reason = "the Hugging Face Hub is switched off (HF_HUB_OFFLINE)"
    except httpx.TransportError as error:
        reason = f"the Hugging Face Hub cannot be reached ({_first_line(error)})"
    except (hub.RepositoryNotFoundError, hub.RevisionNotFoundError, hub.EntryNotFoundError):
        reason = GONE
    except hub.HfHubHTTPError as error:
        reason = f"the Hugging Face Hub answered with an error ({_first_line(error)})"
    raise OSError(f"could not fetch {name} of {repository}: {reason}. {instead}") from None


def _fetch(url: str, metadata: Any, path: Path) -> Path:
    """Download a file or the rest of it; verify its size and, if the Hub gives one, its checksum."""
    import httpx
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{(metadata.etag or 'unknown')[:16]}.part")
    # elsewhere it is a signed URL, which must not get the user's token
    same_host = httpx.URL(metadata.location).host == httpx.URL(url).host
    headers = build_hf_headers() if same_host else {}
    with part.open("ab") as file:
        if metadata.size is not None and file.tell() > metadata.size:
            file.truncate(0)
        http_get(
            metadata.location,
            file,
            resume_size=part.stat().st_size,
            headers=headers,
            expected_size=metadata.size,
            displayed_filename=path.name,
        )
    if len(metadata.etag or "") == 64 and _sha256(part) != metadata.etag:
        part.unlink()
        raise OSError(f"{path.name} was damaged in transfer; run again.")
    part.replace(path)
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0].rstrip(".")
