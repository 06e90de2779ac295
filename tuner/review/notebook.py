"""A run in a notebook: a pandas data frame of its trials, and the figures of its page.

run = tuner.load_run("runs/20260101-120000-...")
run.trials.sort_values("latency_us").head()
run.figures["progress-trial"].show()
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import MachineError
from tuner.review.charts import charts_of
from tuner.review.exports import write_export
from tuner.review.figures import with_hovers
from tuner.review.run_data import RunData
from tuner.review.summary import Summary, format_summary, summary_of
from tuner.review.tables import trial_columns
from tuner.run import open_run

if TYPE_CHECKING:
    import pandas

__all__ = ["LoadedRun", "load_run"]


def load_run(path: str | Path) -> LoadedRun:
    """Read a run, finished or not, as it is now.

    Args:
        path: the run's directory.

    Raises:
        StorageError: there is no run, or a file of it cannot be read.
    """
    return LoadedRun(RunData.of(open_run(Path(path))))


class LoadedRun:
    """A run as it was when it was read; `load_run` makes it.

    Attributes:
        run_data: all that was read.
    """

    def __init__(self, run_data: RunData) -> None:
        self.run_data = run_data

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.run_data.run.path

    @cached_property
    def summary(self) -> Summary:
        """The verdict and the numbers behind it."""
        return summary_of(self.run_data)

    @cached_property
    def trials(self) -> pandas.DataFrame:
        """Every trial, a row each, indexed by `number`; the page's table and CSV, by value.

        `latency_us` and what else a trial does not have is missing (NaN or None); `noise` and
        `occupancy` are shares of 1; the other units end the names.

        Raises:
            MachineError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise MachineError(
                "load_run(...).trials: a data frame needs pandas, which is not installed\n"
                "  next: pip install 'tuner[notebook]', or pip install pandas"
            ) from error
        columns = {column.name: list(column.values) for column in trial_columns(self.run_data)}
        return pandas.DataFrame(columns).set_index("number")

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The page's figures by name, as `plotly.graph_objects.Figure`.

        The names are `tuner.review.charts.CHART_NAMES`; one that this run cannot have is absent.
        """
        charts = charts_of(self.run_data)
        return {
            chart.name: with_hovers(chart.figure, self.run_data.trials)
            for chart in charts
            if chart.figure is not None
        }

    def write(self, path: str | Path) -> Path:
        """Write the trials (.csv, .parquet) or the timeline (.json, for Perfetto) to a file.

        Raises:
            InputError: the file's name ends otherwise.
            MachineError: pyarrow is not installed, which .parquet needs.
            StorageError: the file cannot be written.
        """
        return write_export(self.run_data.run, Path(path))

    def __repr__(self) -> str:
        return format_summary(self.summary)
