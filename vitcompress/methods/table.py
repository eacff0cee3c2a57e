"""The table of methods. To add one: a file here, its object in `MAIN`, its options in `options`."""

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

MAIN = (HETDPT, NOSE, ISOMORPHIC, SERO, UPVIT, MAGNITUDE, RECOVER, FOLD)
ABLATIONS = (ACTIVATION_ONLY, TE_STATIC, HETDPT_NO_STEP1, HETDPT_NO_STEP2, RANDOM, FIXED)
METHODS: dict[str, Method] = {method.name: method for method in (*MAIN, *ABLATIONS)}


def find_method(method: str | Method) -> Method:
    """The method of this name, built in or of an installed package. Raises InputError if there is none."""
    return find_by_name(method, METHODS, "methods", "method")
