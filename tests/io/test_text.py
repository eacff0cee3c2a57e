"""How numbers, ranges and names are written for people."""

from vitcompress.io.text import between, choose, compared, figure, milliseconds, short, span


def test_whole_counts_keep_all_their_digits_and_the_rest_three() -> None:
    assert [figure(v) for v in (951836, 1234.5, 0.22824, 1.25e-6, 0)] == [
        "951,836",
        "1.23e+03",
        "0.228",
        "1.25e-06",
        "0",
    ]


def test_a_range_of_one_is_that_one() -> None:
    assert (span(2, 8), span(2, 2), span("1.20 ms", "1.20 ms")) == ("2 to 8", "2", "1.20 ms")
    assert choose("pruned_layers", 2, 8) == "choose pruned_layers from 2 to 8"
    assert choose("pruned_layers", 2, 2) == "choose pruned_layers = 2"


def test_figures_have_the_digits_that_they_carry() -> None:
    assert [milliseconds(value) for value in (0.0061694, 0.8913, 26.644, 7240.476)] == [
        "0.00617", "0.891", "26.64", "7,240",
    ]  # fmt: skip
    ratio = {"a": "x", "b": "y", "median": 183.655, "ci95": [1.5, None]}
    assert compared(ratio) == "y is 183.7 times as fast as x (no interval: that takes 6 rounds)"
    assert between([1.5, 12.345]) == "95 % interval 1.50 to 12.3"


def test_artifacts_are_told_apart_by_as_little_as_it_takes() -> None:
    assert short(["a/dense.onnx", "a/model.onnx"]) == ["dense.onnx", "model.onnx"]
    assert short(["/r/a/model.onnx", "/r/b/model.onnx"]) == ["a/model.onnx", "b/model.onnx"]
    assert short(["m.onnx", "a/m.onnx", "timm:x", "timm:x"]) == ["m.onnx", "a/m.onnx", "timm:x", "timm:x"]
