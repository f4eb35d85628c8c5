"""Benchmarks: CAM, its peers and the memory's own speed, measured in one run, every result checked first.

    report = cam.bench.run(Plan(tokens=(1, 128), ranks=(2,)))

Start with benchmark (one run); then plan (what is asked for), worker (what a rank does), contenders and
cam_contenders (who takes part), golden (what is right), startline and samples (how time is taken), report and
picture (what is shown).
"""

from cam.bench.benchmark import run
from cam.bench.plan import Case, Plan
from cam.bench.report import CaseResult, Report, Row

__all__ = ["Case", "CaseResult", "Plan", "Report", "Row", "run"]
