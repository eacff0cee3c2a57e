"""The stages of a run, from the dense model to the report. One table drives run, resume and dry run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from vitcompress.io.manifest import write_manifest
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline import dense, finalize, prune, recover, report
from vitcompress.pipeline.export import export_models
from vitcompress.pipeline.job import Job, Work


@dataclass(frozen=True)
class Stage:
    """A part of the work. Stages hand over their results as files, so each of them can be the first of a resumed run.

    output(job): the file that `run` writes last; if it exists, there is nothing to do. None: the stage runs always, and
    skips by itself what exists. estimate(job): its rows of a dry run.
    """

    title: str
    run: Callable[[Job], object]
    output: Callable[[Job], Path] | None
    estimate: Callable[[Job], Iterable[Work]]


# Under torchrun, all processes take part in the first stages; the first process runs the others when they have ended.
SHARED_STAGES = (
    Stage("dense model", dense.create_dense, lambda job: RunFolder(job.dense_folder).plan, dense.estimate_dense),
    Stage("check the dense model", dense.check_dense, None, lambda job: ()),
    Stage("prune", prune.run_steps, lambda job: job.steps[-1].files.plan, prune.estimate_steps),
    Stage("fine-tune", recover.recover, lambda job: job.files.unfolded_plan, recover.estimate_recovery),
    Stage("control", recover.train_control, lambda job: RunFolder(job.files.control).plan, recover.estimate_control),
)
LATER_STAGES = (
    Stage("fold", finalize.fold_model, lambda job: job.files.plan, lambda job: [Work("fold")]),
    Stage("export", export_models, None, lambda job: [Work(f"export {name}") for name in job.recipe.export.formats]),
    Stage("verify", finalize.verify_run, None, lambda job: [Work("verify")]),
    Stage("evaluate", finalize.evaluate_models, lambda job: job.files.accuracy, finalize.estimate_evaluation),
    Stage("measure", finalize.bench_models, lambda job: job.files.benchmark, finalize.estimate_bench),
    Stage("report", report.write_report, lambda job: job.files.report, lambda job: [Work("report")]),
    Stage("manifest", lambda job: write_manifest(job.folder), lambda job: job.files.manifest, lambda job: ()),
)
STAGES = (*SHARED_STAGES, *LATER_STAGES)


def run_stages(job: Job, stages: Iterable[Stage]) -> None:
    """Run the `stages` whose output does not exist; of several processes the first one decides."""
    for stage in stages:
        output = stage.output and stage.output(job)
        if job.runtime.broadcast(output is not None and output.is_file()):
            job.progress.note(f"{stage.title}: already done, {output}")
        else:
            stage.run(job)
