"""The one exception a user is meant to see."""


class KlbError(Exception):
    """One line that says what is wrong, where, and what to do next.

    The command line prints it and exits with code 2; no traceback unless ``--debug``.

    Examples:
        >>> klb.load_domains(["airlines"])
        Traceback (most recent call last):
            ...
        klb_probe.errors.KlbError: unknown domain airlines; known: airline, billing, debt, deposit, ...
    """
