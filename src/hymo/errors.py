"""Errors that a person caused and can mend: the command line prints their lines, without a traceback."""


class HyMoError(ValueError):
    """Says in one line what was found and what is accepted."""

    exit_code = 2


class DataError(HyMoError):
    """The data a user gave is at fault: the line names the file or key, what was found, what is accepted."""


class NotFiniteError(HyMoError):
    """A run stopped because its losses or gradients stayed non-finite."""

    exit_code = 3
