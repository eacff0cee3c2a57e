"""How numbers, ranges and names are written for people."""

from vitcompress.io.text import (
    describe_ratio,
    format_interval,
    format_milliseconds,
    format_number,
    format_range,
    shorten_paths,
    suggest_range,
)


def test_whole_counts_keep_all_their_digits_and_the_rest_three() -> None:
    assert [format_number(v) for v in (951836, 1234.5, 0.22824, 1.25e-6, 0)] == [
        "951,836",
        "1.23e+03",
        "0.228",
        "1.25e-06",
        "0",
    ]


def test_a_range_of_one_is_that_one() -> None:
    assert (format_range(2, 8), format_range(2, 2), format_range("1.20 ms", "1.20 ms")) == ("2 to 8", "2", "1.20 ms")
    assert suggest_range("pruned_layers", 2, 8) == "choose pruned_layers from 2 to 8"
    assert suggest_range("pruned_layers", 2, 2) == "choose pruned_layers = 2"


def test_figures_have_the_digits_that_they_carry() -> None:
    assert [format_milliseconds(value) for value in (0.0061694, 0.8913, 26.644, 7240.476)] == [
        "0.00617", "0.891", "26.64", "7,240",
    ]  # fmt: skip
    ratio = {"a": "x", "b": "y", "median": 183.655, "ci95": [1.5, None]}
    assert describe_ratio(ratio) == "y is 183.7 times as fast as x (no interval: that takes 6 rounds)"
    assert format_interval([1.5, 12.345]) == "95 % interval 1.50 to 12.3"


def test_artifacts_are_told_apart_by_as_little_as_it_takes() -> None:
    assert shorten_paths(["a/dense.onnx", "a/model.onnx"]) == ["dense.onnx", "model.onnx"]
    assert shorten_paths(["/r/a/model.onnx", "/r/b/model.onnx"]) == ["a/model.onnx", "b/model.onnx"]
    assert shorten_paths(["m.onnx", "a/m.onnx", "timm:x", "timm:x"]) == ["m.onnx", "a/m.onnx", "timm:x", "timm:x"]
