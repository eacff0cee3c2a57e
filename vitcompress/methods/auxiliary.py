"""Steps that prune nothing: `recover` trains the model between two pruning steps, `fold` multiplies out what is linear.

HetDPT+ is made of them: hetdpt, recover, fold, isomorphic, and the recovery that ends every recipe. Folding in between
turns an FFN that lost its activation into one linear layer on the residual stream, which is what the width step prunes.
"""

from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress import surgery
from vitcompress.io.text import Columns, Table
from vitcompress.methods.base import Context, Estimate, Method, StepInfo, StepReport, read_memo, reject_unused
from vitcompress.methods.calibration import training_subset
from vitcompress.methods.options import FoldOptions, RecoverOptions
from vitcompress.plan import Plan
from vitcompress.training.options import TrainOptions
from vitcompress.training.trainer import TrainingControls


def recover(model: nn.Module, context: Context, options: RecoverOptions) -> Plan:
    """Train a copy of `model` as the recipe's recovery does, teacher included, and hand its weights over."""
    copy, images, heldout = deepcopy(model), training_subset(context, 0), context.data.heldout
    label, settings = "recovery between steps", recovery_settings(context.train, options)
    controls = TrainingControls(context.teacher())
    context.run_training(copy, images, heldout, settings, "training", label=label, controls=controls)
    context.hand_over(copy.cpu())
    return context.plan.delta()


def recovery_settings(base: TrainOptions, options: RecoverOptions) -> TrainOptions:
    """The options of [finetune], `base`, with those of the step. Raises PlanError for an option without effect."""
    kind, reason = base.distillation, f"finetune.distillation is {base.distillation!r}"
    reject_unused(options, {"alpha": kind == "none" and reason, "teacher_smoothing": kind != "hard" and reason})
    own: dict[str, Any] = {name: value for name, value in vars(options).items() if value is not None}
    return replace(base, **own | ({"lr_base": None} if options.lr is not None else {}))


def fold(model: nn.Module, context: Context, options: FoldOptions) -> Plan:
    """Every FFN without activation and every LayerScale behind a linear layer, folded in place by the plan."""
    plan, records = surgery.fold_linears(deepcopy(model), context.plan.delta())
    context.memo("fold", lambda: list(map(asdict, records)))
    for record in records:
        context.progress.note(f"{record.module}: {'folded' if record.folded else 'left as it is'}, {record.reason}")
    return plan


def report_fold(folder: Path) -> StepReport:
    """The modules that were folded, and those that were not."""
    columns: Columns = {
        "module": "{module}",
        "folded": lambda record: "yes" if record["folded"] else "no",
        "why": "{reason}",
        "parameters before": "{params_before}",
        "after": "{params_after}",
    }
    records = read_memo(folder, "fold")
    return StepReport([] if records is None else [Table.of("Folded between the steps", columns, records)])


RECOVER = Method(
    "recover",
    "train the model as it is, between two steps",
    options=RecoverOptions,
    plan=recover,
    structure=lambda model, family, base, options: base.delta(),  # training changes no structure
    estimate=lambda model, family, options: [Estimate("recover between steps", 1, options.epochs)],
    describe=lambda options: StepInfo(None, lambda finetune: recovery_settings(finetune, options)),
)


FOLD = Method(
    "fold",
    "multiply out what has become linear, so that the next step prunes the product",
    options=FoldOptions,
    plan=fold,
    structure=lambda model, family, base, options: surgery.fold_linears(deepcopy(model), base.delta())[0],
    describe=lambda options: StepInfo(None),
    report=report_fold,
)
