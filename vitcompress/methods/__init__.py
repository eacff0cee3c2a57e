"""Methods: what to remove. To add one: a file beside this one, and its name in `METHODS`."""

from vitcompress.errors import InputError, did_you_mean
from vitcompress.io.plugins import load_plugin
from vitcompress.methods.ablations import FIXED, HETDPT_NO_STEP1, HETDPT_NO_STEP2, RANDOM, TE_STATIC
from vitcompress.methods.auxiliary import FOLD, RECOVER
from vitcompress.methods.base import Method
from vitcompress.methods.hetdpt.method import HETDPT
from vitcompress.methods.isomorphic import ISOMORPHIC
from vitcompress.methods.magnitude import MAGNITUDE
from vitcompress.methods.nose import ACTIVATION_ONLY, NOSE
from vitcompress.methods.sero.method import SERO
from vitcompress.methods.upvit.method import UPVIT

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        HETDPT,
        NOSE,
        ACTIVATION_ONLY,
        TE_STATIC,
        HETDPT_NO_STEP2,
        HETDPT_NO_STEP1,
        RANDOM,
        FIXED,
        ISOMORPHIC,
        MAGNITUDE,
        SERO,
        RECOVER,
        FOLD,
        UPVIT,
    )
}


def find_method(method: str | Method) -> Method:
    """The method of this name, from `METHODS` or an entry point of the group `vitcompress.methods`.

    A Method is returned as it is.

    Raises:
        InputError: no such method.
    """
    if isinstance(method, Method):
        return method
    known = METHODS.get(method) or load_plugin("methods", method, Method)
    if known is None:
        raise InputError(
            f"there is no method {method!r}{did_you_mean(method, METHODS)}",
            hint=f"use one of {', '.join(METHODS)}, or install the package that declares it",
        )
    return known


__all__ = ["METHODS", "Method", "find_method"]
