"""Errors keep what they state in other processes."""

import copy
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from vitcompress.errors import MissingExtraError, RecipeError, VitcompressError
from vitcompress.recipe.load import load_recipe

OWN = {
    RecipeError: RecipeError("x.toml", ["a   is missing", "b   is unknown"], hint="see b"),
    MissingExtraError: MissingExtraError("onnx", "export", need="an export"),
}


def subclasses(kind: type[VitcompressError]) -> Iterator[type[VitcompressError]]:
    yield kind
    for own in kind.__subclasses__():
        yield from subclasses(own)


@pytest.mark.parametrize("kind", [*subclasses(VitcompressError)], ids=lambda kind: kind.__name__)
def test_errors_can_be_copied_and_pickled(kind: type[VitcompressError]) -> None:
    error = OWN.get(kind) or kind("it is 3\n  expected 4", hint="use 4")
    texts = [pickle.dumps(error, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in (copy.copy(error), *map(pickle.loads, texts)):
        assert type(other) is kind and other is not error
        assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))
        assert (other.sentence(), other.exit_code) == (error.sentence(), error.exit_code)
        assert other.__notes__ == [error.hint]


def test_a_wrong_recipe_in_another_process_is_reported() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        work = pool.submit(load_recipe, "digits_random", ["finetune.epochs=-1"])
        with pytest.raises(RecipeError, match="1 problem") as caught:
            work.result()
    assert caught.value.problems[0].startswith("finetune.epochs")
