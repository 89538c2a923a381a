"""What a user can mend is a `UserError`; everything else is a bug or an outage and keeps its traceback."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, 130


class UserError(Exception):
    """Bad input or configuration (exit code 2).

    message: one sentence: what is wrong, in which file and which field. hint: what to do next.
    """

    exit_code = EXIT_USER

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class RunFailed(UserError):
    """A check of our own output failed, such as the parity check (exit code 1). Same shape as `UserError`."""

    exit_code = EXIT_FAILED


class Interrupted(Exception):
    """The first Ctrl-C or SIGTERM, after the state was saved (exit code 130)."""
