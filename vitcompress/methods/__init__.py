"""Methods: what to remove. To add one: a file beside this one, and its name in `METHODS`."""

from vitcompress.methods.ablations import FIXED, HETDPT_NO_STEP1, HETDPT_NO_STEP2, RANDOM, TE_STATIC
from vitcompress.methods.auxiliary import FOLD, RECOVER
from vitcompress.methods.base import Method
from vitcompress.methods.hetdpt.method import HETDPT
from vitcompress.methods.isomorphic import ISOMORPHIC
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
        SERO,
        RECOVER,
        FOLD,
        UPVIT,
    )
}

__all__ = ["METHODS", "Method"]
