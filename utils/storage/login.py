"""Whether this machine has a login for gs://, without a request to a bucket."""

from __future__ import annotations

import os

from utils.errors import UserError


def google_login() -> str | None:
    """Where application default credentials come from, in a word; None where there are none.
    Raises UserError where GOOGLE_APPLICATION_CREDENTIALS names a file that is none.

    Whether they open a certain bucket is for `python -m utils.check_paths`.
    """
    os.environ.setdefault("GCE_METADATA_TIMEOUT", "1")  # s; elsewhere than at Google nobody answers
    import google.auth  # here: it reads the variable as it is imported
    from google.auth.exceptions import DefaultCredentialsError

    try:
        credentials, _ = google.auth.default()
    except DefaultCredentialsError as error:
        named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        if named:
            raise UserError(
                f"GOOGLE_APPLICATION_CREDENTIALS: expected a file with a key, found {named}: "
                "name another one, or unset it"
            ) from error
        return None
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return "GOOGLE_APPLICATION_CREDENTIALS"
    return type(credentials).__module__.rpartition(".")[2].replace("_", " ")
