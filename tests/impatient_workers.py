"""What workers need not wait for here; the servers that fork them import it, by $TUNER_PRELOAD.

No test asks who wins a race. Before each sample its processes overwrite 128 MB, in 15 ms, and
before each burst they sleep for twice as long: that was nearly all of a race's time in tests.
"""

from tests.rows_of_tests import FEW_ROWS
from tuner.capture import rows_tried
from tuner.evaluate import in_turns, timed, timers

timed.SETTLE_S["cpu"] = 0.002
timers._MAX_FLUSH_BYTES = 2**18  # 20 us a sample; no test asks what cold caches cost
in_turns.ROW_S = 0.001  # of calls in a row: at a dozen numbers of rows it was half a second
rows_tried._TRIED = FEW_ROWS
