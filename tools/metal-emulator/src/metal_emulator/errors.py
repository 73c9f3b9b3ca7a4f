"""The one error a kernel can end with here."""


class EmulatorError(RuntimeError):
    """The kernel does not compile, breaks a rule of the language, or was caught at a bug."""
