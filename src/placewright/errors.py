"""Exceptions that a caller may catch. Everything else that escapes placewright is a bug."""

from __future__ import annotations


class InputError(ValueError):
    """What the caller gave cannot be used; the message says what was expected and what to do."""


class TooLargeError(InputError):
    """What the caller asks for takes more memory than this machine has."""
