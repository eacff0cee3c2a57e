"""Recipes: all problems at once, each with the value, what is allowed and the nearest name."""

import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from vitcompress import recipes
from vitcompress.errors import InputError, RecipeError
from vitcompress.exporters.options import ExportOptions
from vitcompress.methods.table import METHODS
from vitcompress.pipeline.job import RunOptions
from vitcompress.recipe.load import build_recipe, dense_key, load_recipe, load_recipe_of_run
from vitcompress.recipe.schema import Recipe

SMALL = """
[model]
name = "vit_tiny_patch16_224"
weights = "random"

[[step]]
method = "hetdpt"
pruned_layers = 4

[finetune]
epochs = 3
lr = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def problems(path: Path, text: str = SMALL, *sets: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path), sets)
    return list(caught.value.problems)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_valid_and_survives_toml(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.summary
    copy = tmp_path / "recipe.toml"
    copy.write_text(recipe.to_toml())
    again = load_recipe(str(copy))
    assert again == recipe and again.to_toml() == recipe.to_toml()


def test_a_recipe_has_the_name_of_its_file_and_all_defaults(file: Path) -> None:
    recipe = load_recipe(str(file))
    assert recipe.name == "small" and recipe.steps[0].method == "hetdpt"
    assert isinstance(recipe.steps[0].options, METHODS["hetdpt"].options)
    assert recipe.finetune.lr == 1.0 and recipe.finetune.epochs == 3 and recipe.run.seed == 0
    assert recipe.export.formats == ("onnx",)


@pytest.mark.parametrize("change", ["name=", "name=''"])
def test_without_a_name_a_recipe_has_that_of_its_file(file: Path, change: str) -> None:
    """Its run folder was runs/ itself."""
    named = file.with_name("other.toml")
    named.write_text(f'name = "mine"\n{file.read_text()}')
    assert load_recipe(named).name == "mine"
    assert [load_recipe(source, change).name for source in (named, "digits_random")] == ["other", "digits_random"]
    assert RunOptions().folder(load_recipe(file, change)) == Path("runs", file.stem).resolve()
    named.write_text(f'name = ""\n{file.read_text()}')
    assert load_recipe(named).name == load_recipe_of_run(named).name == "other"


def test_all_problems_are_reported_at_once(file: Path) -> None:
    text = """
[model]
name = "vit_tiny_patch16_224"
weight = "random"

[[step]]
method = "hetdpt"
pruned_layer = 4

[[step]]
method = "hetdtp"

[finetune]
epochs = -3
lr = "fast"
schedule = "cosin"

[finetune.augmentation]
mixp = 0.8

[benc]
batch = 1
"""
    lines = {line.split("   ")[0].strip(): line for line in problems(file, text)}
    assert "unknown key, did you mean weights?" in lines["model.weight"]
    assert "unknown key, did you mean pruned_layers?" in lines["step.0.pruned_layer"]
    assert "'hetdtp'" in lines["step.1.method"] and "did you mean hetdpt?" in lines["step.1.method"]
    assert "got -3, expected 0 or more" in lines["finetune.epochs"]
    assert "got 'fast', expected a number" in lines["finetune.lr"]
    assert "got 'cosin', expected one of cosine, constant, did you mean cosine?" in lines["finetune.schedule"]
    assert "unknown key, did you mean mixup?" in lines["finetune.augmentation.mixp"]
    assert "unknown key, did you mean bench?" in lines["benc"]
    assert len(lines) == 8


def test_the_hint_names_the_method_of_the_unknown_key(file: Path) -> None:
    for number, method in enumerate(("isomorphic", "nose", "fold")):
        steps = [{"method": name} for name in ("isomorphic", "nose", "fold")]
        steps[number]["unknown"] = "1"
        with pytest.raises(RecipeError) as caught:
            build_recipe("mine", {"model": {"name": "vit_tiny_patch16_224"}, "step": steps})
        assert f"keys {method} --all" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('epochs = "30"', "got '30', expected a whole number"),
        ("epochs = 2.5", "got 2.5, expected a whole number"),
        ("epochs = true", "got true, expected a whole number"),
        ("epochs = [1]", "got [1], expected a whole number"),
        ("lr = nan", "got nan, expected a finite number"),
        ("lr = 2024-01-01", "got '2024-01-01', expected a number"),
        ("alpha = -0.5", "got -0.5, expected 0 or more"),
        ("alpha = 1.5", "got 1.5, which gives the labels a negative weight; use at most 1, or set label_weight too"),
        ("augmentation = 3", "got 3, expected a table"),
        ("augmentation.scale = [-1.0, 0.5]", "got -1.0, expected more than 0"),
        ("augmentation.scale = [0.5, 1.5]", "got 1.5, expected 1 or less"),
        ("augmentation.ratio = [0.0, 1.0]", "got 0.0, expected more than 0"),
        ("optimizer = 3", "got 3, expected text"),
        ("betas = [0.9]", "is missing"),
        ("betas = 0.9", "got 0.9, expected a list"),
    ],
)
def test_wrong_types_and_ranges(file: Path, line: str, sentence: str) -> None:
    lines = problems(file, SMALL.replace("epochs = 3\nlr = 1", line))
    assert len(lines) == 1 and lines[0].startswith("finetune.") and lines[0].endswith(sentence), lines


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (("[model]", "[modle]"), "model"),
        (('[[step]]\nmethod = "hetdpt"\npruned_layers = 4', ""), "step"),
        (("[[step]]", "[step]"), "step"),
        (('method = "hetdpt"\n', ""), "step.0.method"),
        (('weights = "random"', 'weights = "train"'), "dense"),
        (("lr = 1", 'distillation = "soft"'), "finetune.teacher"),
        (("lr = 1", "[dense]\nepochs = 1"), "dense"),
    ],
)
def test_dependencies_between_tables(file: Path, change: tuple[str, str], place: str) -> None:
    assert change[0] in SMALL
    lines = problems(file, SMALL.replace(*change))
    assert any(line.split("   ")[0].strip() == place for line in lines), lines


def test_the_export_table_survives_toml(file: Path) -> None:
    file.write_text(
        SMALL + '[export]\nformats = ["trt"]\nprecision = "fp16"\nbatch = [1, 8, 64]\nsm = [80, 89]\n'
        'timing_cache = "kernels.bin"\nworkspace = 4096\n'
    )
    table = load_recipe(str(file)).export
    assert table.changed() == ("precision", "batch", "sm", "workspace", "timing_cache")
    assert table.only(["precision"]) == ExportOptions(precision="fp16")
    file.write_text(load_recipe(str(file)).to_toml())
    assert load_recipe(str(file)).export == table
    with pytest.raises(RecipeError, match="optimization_level"):
        load_recipe(str(file), ["export.optimization_level=6"])


def test_not_toml(file: Path) -> None:
    assert "not valid TOML" in problems(file, "[model\n")[0] and "line 1" in problems(file, "[model\n")[0]
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="UTF-8"):
        load_recipe(str(file))


def test_an_unknown_recipe_is_corrected() -> None:
    with pytest.raises(InputError, match="digits_hetdpt"):
        load_recipe("digits_hetdtp")


def test_a_missing_or_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_recipe(str(tmp_path / "none.toml"))
    with pytest.raises(InputError, match="is a folder, not a file"):
        load_recipe(str(tmp_path))
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", Path("/dev/zero")):  # reading would never end
        with pytest.raises(InputError, match="is a pipe or a device"):
            load_recipe(str(path))


def test_set_changes_values_of_all_types(file: Path) -> None:
    recipe = load_recipe(
        str(file),
        [
            "finetune.epochs=7",
            "step[0].pruned_layers=2",
            "step.0.attention_bypass=norm_identity",
            "run.device=cuda:1",
            "finetune.betas=[0.9, 0.95]",
            "model.args.img_size=[64, 32]",
            'finetune.teacher="dense"',
            "finetune.distillation=hard",
            "bench.runs=3",
        ],
    )
    assert (recipe.finetune.epochs, recipe.run.device, recipe.finetune.betas) == (7, "cuda:1", (0.9, 0.95))
    assert recipe.steps[0].options.pruned_layers == 2 and recipe.steps[0].options.attention_bypass == "norm_identity"
    assert recipe.model.args == {"img_size": [64, 32]} and recipe.bench.runs == 3


def test_set_without_a_value_removes_a_key(file: Path) -> None:
    assert load_recipe(str(file)).finetune.epochs == 3
    default = load_recipe("digits_hetdpt", ["finetune.epochs="]).finetune.epochs
    assert load_recipe(str(file), ["finetune.epochs="]).finetune.epochs == default != 3
    assert load_recipe(str(file), ["finetune.epochs=", "finetune.epochs=7"]).finetune.epochs == 7


def test_to_remove_a_key_of_a_missing_table_changes_nothing() -> None:
    assert load_recipe("deit_b_hetdpt", ["dense.lr=", "dense.augmentation.no_aug="]) == load_recipe("deit_b_hetdpt")


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("finetune.epochs", "expected table.key=value"),
        ("=3", "expected table.key=value"),
        ("finetune.epochs=3 4", "is not a TOML value"),
        ("finetune.epochs=1\nmodel.name = 2", "is not a TOML value"),
        ("step.pruned_layers=3", "write its number"),
        ("step[4].pruned_layers=3", "no entry 4: numbers start at 0"),
        ("finetune.epochs.more=3", "no such place"),
        ("finetune.epoch=3", "unknown key, did you mean epochs?"),
        ("seed=3", "unknown key, did you mean run.seed?"),
        ("lr=3", "unknown key, did you mean dense.lr or finetune.lr or quantize.lr?"),
        ("finetune.mixup=0.8", "unknown key, did you mean augmentation.mixup?"),
        ("step.0={method='fold', attention=3}", "unknown key, known: none"),
        ("finetune.epochs=many", "got 'many', expected a whole number"),
    ],
)
def test_an_invalid_set_is_a_problem_of_the_recipe(file: Path, assignment: str, sentence: str) -> None:
    assert any(sentence in line for line in problems(file, SMALL, assignment))


def test_equal_recipes_have_equal_text_and_key(file: Path) -> None:
    one, other = load_recipe(str(file)), load_recipe(str(file), ["finetune.epochs=3"])
    assert one.to_toml() == other.to_toml() and dense_key(one) == dense_key(other)
    assert one.to_toml() != load_recipe(str(file), ["finetune.epochs=4"]).to_toml()
    assert tomllib.loads(one.to_toml())["step"][0]["method"] == "hetdpt"


def test_the_dense_key_depends_only_on_what_affects_the_dense_model() -> None:
    recipe = load_recipe("digits_hetdpt")
    assert recipe.dense is not None
    same = [
        replace(recipe, name="other"),
        replace(recipe, finetune=replace(recipe.finetune, epochs=1)),
        replace(recipe, data=replace(recipe.data, workers=2)),
        replace(recipe, steps=()),
    ]
    other = [
        replace(recipe, dense=replace(recipe.dense, epochs=1)),
        replace(recipe, run=replace(recipe.run, seed=1)),
        replace(recipe, model=replace(recipe.model, args={})),
        replace(recipe, data=replace(recipe.data, heldout=0.5)),
    ]
    assert {dense_key(one) for one in same} == {dense_key(recipe)}
    assert dense_key(recipe) not in {dense_key(one) for one in other} and len({dense_key(one) for one in other}) == len(
        other
    )


def test_the_digits_recipes_of_one_family_share_one_dense_model() -> None:
    every = [load_recipe(name) for name in recipes.names() if name.startswith("digits_")]
    vits: list[Recipe] = [recipe for recipe in every if recipe.model.name.startswith("vit_")]
    assert len(vits) >= 7 and len({dense_key(recipe) for recipe in vits}) == 1


def test_a_set_of_an_option_that_another_choice_disables_is_a_problem() -> None:
    """The recipe holds the options of both choices, so that `layers` can select the search."""
    shipped = load_recipe("deit_s_hetdpt").steps[0].options
    assert shipped.layers == "published" and shipped.collection.batch_size == 1024
    for assignment in ("step.0.collection.epochs=3", "step[0].te.images=8", "step.0.search={factor=2.0}"):
        with pytest.raises(RecipeError, match="has no effect: layers is 'published'"):
            load_recipe("deit_s_hetdpt", [assignment])
        load_recipe("deit_s_hetdpt", [assignment, "step.0.layers=search"])
    assert load_recipe("deit_s_hetdpt", ["step.0.collection="]).steps[0].options.collection.batch_size is None
    with pytest.raises(RecipeError, match="has no effect: layers is 'search'"):
        load_recipe("deit_s_hetdpt", ["step.0.layers=search", "step.0.published_attention=[1]"])


def test_the_default_of_an_unknown_key_is_a_problem() -> None:
    """`KEY=` restores a default. A misspelled key was ignored, and the recipe's value stayed."""
    for known in ("finetune.epochs=", "bench.batch=", "step.0.te.images=", "model.args.drop_rate=", "run.threads="):
        load_recipe("digits_hetdpt", [known])
    for unknown, near in {
        "finetune.epoch=": "epochs",
        "finetun.epochs=": "finetune",
        "step.0.pruned_layer=": "pruned_layers",
        "step.0.te.image=": "images",
        "finetune.augmentation.no_augg=": "no_aug",
    }.items():
        with pytest.raises(RecipeError) as error:
            load_recipe("digits_hetdpt", [unknown])
        assert error.value.problems == (f"--set {unknown}   unknown key, did you mean {near}?",)
        assert "recipes keys hetdpt" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("assignment", "other", "reason"),
    [
        ("lr=0.1", "lr_base=0.1", "lr_base is set"),
        ("min_lr=0.0", "schedule=constant", "schedule is 'constant'"),
        ("warmup_lr=0.1", "warmup_epochs=0", "warmup_epochs is 0"),
        ("select=best", "evaluate_every=0", "evaluate_every is 0"),
        ("alpha=0.3", "distillation=none", "distillation is 'none'"),
        ("label_weight=0.3", "distillation=none", "distillation is 'none'"),
        ("temperature=2.0", "distillation=hard", "distillation is 'hard'"),
        ("patch_weight=0.1", "distillation=soft", "distillation is 'soft'"),
        ("teacher_smoothing=0.1", "distillation=soft", "distillation is 'soft'"),
    ],
)
def test_a_set_of_a_training_option_that_another_one_disables_is_a_problem(
    file: Path, assignment: str, other: str, reason: str
) -> None:
    used = ["finetune.teacher=dense", "finetune.distillation=soft_patch", "finetune.warmup_epochs=1"]
    used += [f"finetune.{assignment}"]
    if "teacher_smoothing" in assignment:
        used[1] = "finetune.distillation=hard"
    load_recipe(str(file), used)
    (problem,) = problems(file, SMALL, *used, f"finetune.{other}")
    assert problem == f"--set finetune.{assignment}   has no effect: {reason}"


def test_another_model_starts_without_the_arguments_of_the_recipe(file: Path) -> None:
    file.write_text(SMALL.replace("[[step]]", "[model.args]\nimg_size = 32\nnum_heads = 2\n\n[[step]]", 1))
    assert load_recipe(str(file)).model.args == {"img_size": 32, "num_heads": 2}
    other = load_recipe(str(file), ["model.args.depth=8"], "deit_small_patch16_224")
    assert (other.model.name, other.model.args) == ("deit_small_patch16_224", {"depth": 8})
    assert replace(other, model=load_recipe(str(file)).model) == load_recipe(str(file))


def test_the_model_of_an_option_needs_no_table(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[step]]\nmethod = "fold"\n')
    assert load_recipe(file, model="vit_tiny_patch16_224", weights="random").model.name == "vit_tiny_patch16_224"
    with pytest.raises(RecipeError, match="model"):
        load_recipe(file)


def test_a_teacher_is_used_unless_distillation_is_none(file: Path) -> None:
    """As `teacher` of `vc.finetune` is."""
    assert load_recipe(str(file)).finetune.distillation == "none"
    for teacher in ("dense", "deit_small_patch16_224.fb_in1k"):
        assert load_recipe(str(file), [f"finetune.teacher={teacher}"]).finetune.distillation == "soft"
    for kind in ("none", "hard"):
        assigned = [f"finetune.distillation={kind}", "finetune.teacher=dense"]
        assert load_recipe(str(file), assigned).finetune.distillation == kind


@pytest.mark.parametrize(
    ("assignment", "remedy"),
    [
        ("data.path=mine", "set data.source"),
        ("data.train_split=train", "set data.source"),
        ("data.test_split=validation", "set data.source"),
        ("data.broken=skip", "set data.source to imagefolder"),
        ("finetune.teacher_weights=mine.pth", "to a timm name"),
    ],
)
def test_files_that_a_recipe_would_not_read_are_a_problem(file: Path, assignment: str, remedy: str) -> None:
    (problem,) = problems(file, SMALL, assignment)
    assert problem.startswith(f"{assignment.partition('=')[0]}   has no effect") and remedy in problem
    others = ["data.source=imagefolder", "finetune.teacher=deit_small_patch16_224.fb_in1k"]
    load_recipe(str(file), [assignment, *others])


def test_one_assignment_may_be_a_text() -> None:
    assert load_recipe("digits_hetdpt", "run.seed=3") == load_recipe("digits_hetdpt", ["run.seed=3"])


def test_other_weights_replace_the_training_of_the_dense_model() -> None:
    """They did so after validation: `--set dense=` was an error, and `--set dense.epochs=7` had no effect."""
    for weights in ("random", "mine.pth"):
        recipe = load_recipe("digits_hetdpt", ["dense="], weights=weights)
        assert (recipe.model.weights, recipe.dense) == (weights, None)
        assert load_recipe("digits_hetdpt", weights=weights) == recipe
        with pytest.raises(RecipeError, match=f"dense   is only used with .*, got '{weights}'"):
            load_recipe("digits_hetdpt", ["dense.epochs=7"], weights=weights)
    own = load_recipe("digits_hetdpt")
    assert load_recipe("digits_hetdpt", weights="train") == own and own.dense is not None
    trained = load_recipe("digits_hetdpt", ["dense.epochs=7"], weights="train").dense
    assert trained == replace(own.dense, epochs=7)
    with pytest.raises(RecipeError, match=r"needs a \[dense\] table"):
        load_recipe("deit_b_hetdpt", weights="train")
