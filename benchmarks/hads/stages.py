"""The stages of a study, in the order of importance. Each stage goes on from the records that exist already."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks import record
from benchmarks.hads.compile_ahead import CALIBRATION_PROGRAMS, compile_calibration
from benchmarks.hads.knowledge import KINDS
from benchmarks.hads.methods import ABLATIONS, ORACLES, OURS, RIVALS, STRENGTHENED
from benchmarks.hads.settings import FIRST, LAST_ROWS_METHODS, LONG_BUDGETS, LONG_METHODS, TASK_METHODS
from benchmarks.hads.study import Study
from benchmarks.hads.tasks import NAMES as TASKS
from benchmarks.hads.texts import CALIBRATION, EVALUATION
from benchmarks.hads.times import attention_times
from xsake._ground import atomic
from xsake.hads.calibration.calibrate import calibrate as calibrate_model
from xsake.hads.study.portrait import portrait
from xsake.hads.study.summary import retention, summarise


def calibrate(study: Study) -> None:
    """Make the HADS profile and what other methods must know, if they are asked for; a file that exists is kept."""
    if study.profile_path.exists():
        study.say(f"{study.profile_path.name} is there")
    else:
        _calibrate_hads(study)
    _measure_knowledge(study)


def _measure_knowledge(study: Study) -> None:
    """Make what the methods that are asked for must know beyond the profile, unless it is there."""
    for kind in KINDS:
        path = study.known_paths[kind.file]
        if study.wanted(kind.methods) and not path.exists():
            study.say(f"measuring {kind.what}")
            kind.measure(study.model, _calibration_tokens(study), study.settings.block).save(path)


def _calibrate_hads(study: Study) -> None:
    s, tokens = study.settings, _calibration_tokens(study)
    last = ""

    def report(what: str, done: int, of: int) -> None:
        nonlocal last
        if what != last:
            study.say(f"calibrating on {len(tokens)} texts: {what}")
        last = what

    compile_calibration(study)
    study.programs.wait_for(*CALIBRATION_PROGRAMS)
    profile = calibrate_model(
        study.model, tokens, name=s.name, **s.grid.shape, sensitivity_sequences=len(CALIBRATION), progress=report
    )
    profile.save(study.profile_path)
    study.say(repr(profile))


def _calibration_tokens(study: Study) -> np.ndarray:
    return np.stack([text.tokens for text in study.read(CALIBRATION, study.settings.calibration_sequences)])


def first(study: Study) -> None:
    """HADS, the oracles and the strongest rivals on the first texts."""
    s = study.settings
    texts = study.read(EVALUATION, s.batch // len(EVALUATION) or 1)
    done = study.evaluate(texts, study.wanted(FIRST), s.budgets)
    # With equal shares for all layers, oracle_top_k treats all heads of all layers alike: a comparison with it also
    # shows what the profile's division of blocks is worth.
    done = done and study.evaluate(texts, study.wanted(["oracle_top_k", "hads"]), s.budgets, layers="uniform")
    if done:  # with all blocks: how far the rounding of two kernels moves a model
        study.evaluate(texts, study.wanted(["sliding_window"]), [1.0])
    study.report()


def long(study: Study) -> None:
    """For texts so long that a run may end early: all methods on one text after the other, so that a run that is cut
    off has the same texts of every method but for the last text; first the budgets that tell most. What methods must
    know beyond the profile is made if it is missing."""
    s = study.settings
    _measure_knowledge(study)
    texts, methods = study.read(EVALUATION, s.sequences), study.wanted(LONG_METHODS)
    for some in LONG_BUDGETS:
        budgets = [b for b in some if b in s.budgets]
        if methods and budgets and not study.evaluate(texts, methods, budgets):
            break
    study.report()


def screen(study: Study) -> None:
    """Every method on some texts, and the data for the pictures of heads and of one mask."""
    s = study.settings
    names = study.wanted([*OURS, *ABLATIONS, *ORACLES, *STRENGTHENED, *RIVALS])
    texts = study.read(EVALUATION, s.screened // len(EVALUATION))
    if study.evaluate(texts, names, s.budgets):
        # Above, rivals are lent our division among layers, which makes them stronger. Their papers have none.
        best = ["hads", "oracle_top_k", *study.best_rivals(among=RIVALS)]
        study.evaluate(texts, study.wanted(best), s.budgets, layers="uniform")
    study.report()
    if not study.stop():
        text = study.read(EVALUATION, 1)[0]
        seen = portrait(study.model, study.profile, text.tokens, s.budgets[0])._asdict()
        with atomic.replacing(study.out / f"portrait-{s}.npz") as file:
            np.savez_compressed(file, text=text.name, **seen)


def tasks(study: Study) -> None:
    """How many of the dense model's right answers each method keeps."""
    s = study.settings
    texts = study.read([f"{name}-{s.length}" for name in TASKS], s.sequences)
    study.evaluate(texts, study.wanted(TASK_METHODS), [b for b in s.task_budgets if b in s.budgets])
    for domain, method, budget, asked, share in sorted(retention(study.records)):
        study.say(f"{domain:14} {method:22} at {budget:.0%} keeps {share:6.1%} of {asked} answers")
    study.report(quiet=True)


def last_rows(study: Study) -> None:
    """Tasks and some texts with the weight of the last rows, which HADS's rule alone has, given to every method, and to
    none."""
    s = study.settings
    natural = study.read(EVALUATION, s.screened // len(EVALUATION))
    asking = study.read([f"{name}-{s.length}" for name in TASKS], s.sequences)
    names, budgets = study.wanted(LAST_ROWS_METHODS), [b for b in s.task_budgets if b in s.budgets]
    for setting in ("every", "none"):
        for texts in (natural, asking):
            if not study.evaluate(texts, names, budgets, last_rows=setting):
                return
        for domain, method, budget, asked, share in sorted(retention(study.records, setting)):
            study.say(f"{setting:6} {domain:21} {method:22} at {budget:.0%} keeps {share:6.1%} of {asked} answers")
    study.report(quiet=True)


def seed(study: Study) -> None:
    """The project's first table: patterns at their unequal shares of blocks, then all at HADS's share; with times."""
    s = study.settings
    texts = study.read(EVALUATION, s.screened // len(EVALUATION))
    pairs = list(s.seed.items())
    pairs += [(name, s.seed["hads"]) for name in s.seed if name != "hads"]
    for name, budget in pairs:
        if not study.evaluate(texts, study.wanted([name]), [budget]):
            return
    timed = [("dense", 1.0), *((name, budget) for name, budget in pairs if name in s.methods)]
    rows = {(row.method, row.budget): row for row in summarise(study.records) if row.layers == "profile"}
    lines = []
    for (name, budget), (mask, attention) in attention_times(study, texts, timed).items():
        row = rows.get((name, budget))
        kl, gap = (0.0, 0.0) if row is None else (row.kl, row.perplexity_gap)
        line = {"method": name, "active_blocks": budget, "mask_ms": mask, "attention_ms": attention, "kl": kl}
        lines.append(line | {"perplexity_gap": gap})
        study.say(f"{name:16} {budget:6.1%}  mask {mask:7.2f} ms  attention {attention:7.2f} ms  KL {kl:.4f}")
    record.save(f"seed-{s}", lines, study.out, settings=study.about())


def full(study: Study) -> None:
    """HADS, its two nearest kin, the three best rivals and the oracles on all texts.

    The outer loop is over batches of texts, so that a run that is cut off has whole batches.
    """
    best = study.best_rivals()
    texts = study.read(EVALUATION, study.settings.sequences)
    ours = ["hads", "hads_group", "hads_shares_top_k+forced"]
    done = study.evaluate(texts, study.wanted([*ours, *best]), study.settings.budgets)
    done = done and study.evaluate(texts, study.wanted(["oracle_top_k", "oracle_gain"]), study.settings.budgets)
    study.report()
    study.say("all texts are read" if done else "not all texts are read: run again")


BY_DEFAULT = ("calibrate", "first", "screen", "tasks", "last_rows", "seed", "full")
STAGES: dict[str, Callable[[Study], None]] = {
    stage.__name__: stage for stage in (calibrate, long, first, screen, tasks, last_rows, seed, full)
}
