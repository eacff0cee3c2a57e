"""The stages of a run, in order. This list drives runs, resumed runs and dry runs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from vitcompress.pipeline import dense, finalize, prune, recover, report
from vitcompress.pipeline.export import export_models
from vitcompress.pipeline.job import Job, Work


@dataclass(frozen=True)
class Stage:
    """A part of the work. Stages hand over their results as files, so each of them can be the first of a resumed run.

    run(job): does the work. output(job): the file that it writes last; if it exists, there is nothing to do. None: the
    stage runs always, and skips by itself what exists. estimate(job): its rows of a dry run. every_process: under
    torchrun, all processes take part; other stages are run by the first process when the others have ended.
    """

    title: str
    run: Callable[[Job], None]
    output: Callable[[Job], Path] | None
    estimate: Callable[[Job], Iterable[Work]]
    every_process: bool = False

    def is_done(self, job: Job) -> bool:
        """Whether the output exists; of several processes the first one decides."""
        done = self.output is not None and self.output(job).is_file()
        return bool(job.runtime.broadcast(done))


DENSE = Stage("dense model", dense.create_dense, dense.dense_plan, dense.estimate_dense, every_process=True)
PRUNE = Stage("prune", prune.prune, lambda job: job.steps[-1].files.plan, prune.estimate_steps, every_process=True)
RECOVER = Stage(
    "fine-tune", recover.recover, lambda job: job.files.unfolded_plan, recover.estimate_recovery, every_process=True
)
FOLD = Stage("fold", finalize.fold_model, lambda job: job.files.plan, lambda job: [Work("fold")])
EXPORT = Stage(
    "export", export_models, None, lambda job: [Work(f"export {name}") for name in job.recipe.export.formats]
)
VERIFY = Stage("verify", finalize.verify_run, None, lambda job: [Work("verify")])
EVALUATE = Stage("evaluate", finalize.evaluate_models, lambda job: job.files.accuracy, finalize.estimate_evaluation)
BENCH = Stage("measure", finalize.bench_models, lambda job: job.files.benchmark, finalize.estimate_bench)
REPORT = Stage("report", report.write_report, lambda job: job.files.report, lambda job: [Work("report")])

STAGES = (DENSE, PRUNE, RECOVER, FOLD, EXPORT, VERIFY, EVALUATE, BENCH, REPORT)


def run_stages(job: Job, stages: Iterable[Stage] = STAGES) -> None:
    """Run the `stages` whose output does not exist."""
    for stage in stages:
        if stage.is_done(job):
            assert stage.output is not None
            job.progress.note(f"{stage.title}: already done, {stage.output(job)}")
        else:
            stage.run(job)
