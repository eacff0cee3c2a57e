"""The table of methods. To add one: a file here, its name in `METHODS`, its options in `options`."""

from vitcompress.io.plugins import find_by_name
from vitcompress.methods.ablations import FIXED, HETDPT_NO_STEP1, HETDPT_NO_STEP2, RANDOM, TE_STATIC
from vitcompress.methods.auxiliary import FOLD, RECOVER
from vitcompress.methods.base import Method
from vitcompress.methods.hetdpt.method import HETDPT
from vitcompress.methods.isomorphic import ISOMORPHIC
from vitcompress.methods.magnitude import MAGNITUDE
from vitcompress.methods.nose import ACTIVATION_ONLY, NOSE
from vitcompress.methods.sero.method import SERO
from vitcompress.methods.upvit.method import UPVIT

DEPTH = (HETDPT, NOSE, ACTIVATION_ONLY, TE_STATIC, HETDPT_NO_STEP2, HETDPT_NO_STEP1, RANDOM, FIXED)
OTHERS = (ISOMORPHIC, MAGNITUDE, SERO, RECOVER, FOLD, UPVIT)
METHODS: dict[str, Method] = {method.name: method for method in (*DEPTH, *OTHERS)}


def find_method(method: str | Method) -> Method:
    """The method of this name, built in or of an installed package. Raises InputError if there is none."""
    return find_by_name(method, METHODS, "methods", "method")
