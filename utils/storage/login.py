"""Whether this machine has a login for gs://, without a request to a bucket."""

from __future__ import annotations

import os


def google_login() -> str | None:
    """Where application default credentials come from, in a word; None where there are none.

    Whether they open a certain bucket is for `python -m utils.check_paths`.
    """
    os.environ.setdefault("GCE_METADATA_TIMEOUT", "1")  # s; elsewhere than at Google nobody answers
    import google.auth  # here: it reads the variable as it is imported
    from google.auth.exceptions import DefaultCredentialsError

    try:
        credentials, _ = google.auth.default()
    except DefaultCredentialsError:
        return None
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return "GOOGLE_APPLICATION_CREDENTIALS"
    return type(credentials).__module__.rpartition(".")[2].replace("_", " ")
