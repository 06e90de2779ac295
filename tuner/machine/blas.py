"""NumPy's own threads, which spin beside what is timed."""

from __future__ import annotations

__all__ = ["one_thread_for_numpy"]


def one_thread_for_numpy() -> None:
    """Let NumPy's and SciPy's products of this process, and of its forks, run in one thread.

    Products of a few thousand numbers wake OpenBLAS's threads, which then spin for 25 ms: in a
    process that compares answers and times calls, calls of 1 ms took 5 ms on two cores. And they
    wait for threads that another process keeps from running: 1.2 ms, not 20 us. What PyTorch
    multiplies by keeps its threads, also where that is another OpenBLAS.
    """
    import numpy  # noqa: F401  # so that its library is there
    from threadpoolctl import ThreadpoolController

    for library in ThreadpoolController().lib_controllers:
        if library.user_api == "blas" and (
            "numpy" in library.filepath or "scipy" in library.filepath
        ):
            library.set_num_threads(1)
