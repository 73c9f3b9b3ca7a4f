"""The errors a caller may want to catch. Everything else is a built-in type or a bug of ours."""


class SpecError(Exception):
    """What the user asked for cannot be done. The message says what must hold, and what to do."""


class LoadError(SpecError):
    """A model, a drafter or a file was refused: wrong kind, wrong shape, missing part."""


class StateError(SpecError):
    """A call came at the wrong time, such as a second verify while a block is open."""


class NumericsError(SpecError):
    """The target's logits are not numbers, so no token can be drawn from them."""


def one_line(error: Exception, most: int) -> str:
    """What another library says, in one line of at most `most` characters; else its type."""
    return " ".join(str(error).split())[:most] or type(error).__name__
