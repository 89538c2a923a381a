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


def explain(error: BaseException) -> tuple[int, str, str] | None:
    """The one place that turns an exception into (exit code, message, hint); None: a bug, let the traceback out.

    A full disk and a broken torchvision reach us under many types (OSError, SafetensorError, RuntimeError), often as
    the cause of another exception, so they are known by their text.
    """
    if isinstance(error, UserError):
        return error.exit_code, error.message, error.hint
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return EXIT_INTERRUPTED, f"Interrupted: {error}" if str(error) else "Interrupted.", "Go on with --resume."
    cause: BaseException | None = error
    while cause is not None:
        if "No space left on device" in str(cause):
            return EXIT_USER, f"No space left on the disk: {cause}.", "Free some space, then go on with --resume."
        if "torchvision::nms does not exist" in str(cause):
            cure = "Run `pip uninstall -y torchvision torchaudio torchcodec`; `draftkit doctor` checks the rest."
            return EXIT_USER, "The installed torchvision was built for another torch, and vLLM runs without it.", cure
        cause = cause.__cause__ or cause.__context__
    return None
