"""What a run writes: a record per round for reports, and a checkpoint to resume from."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcontext import checkpoint
from fedcontext.files.storage import check_target, clean, lock
from fedcontext.flower.exclusion import Carried
from fedcontext.flower.protocol import Arrays
from fedcontext.records import RoundRecord
from fedcontext.results.diagnosis import Monitor, diagnose
from fedcontext.results.run_file import append_records, open_run

log = logging.getLogger("flwr")
ENDING = 30  # seconds in which a server app ends after its SuperLink was killed


@dataclass(frozen=True)
class RunState:
    """What a run carries from round to round."""

    number: int  # of completed rounds
    params: Arrays
    carried: Carried = field(default_factory=Carried)
    loss: float | None = None  # at params, if known
    lost: int = 0  # consecutive lost rounds


class RunLog:
    """The records file and the checkpoint of a run; either may be absent."""

    def __init__(self, records_file: str | Path | None, checkpoint_file: str | Path | None) -> None:
        self._records = Path(records_file) if records_file else None
        self._checkpoint = Path(checkpoint_file) if checkpoint_file else None
        self._files = [path for path in (self._records, self._checkpoint) if path]
        for path in self._files:
            check_target(path)
        self._active: Path | None = None  # the file that the records go to
        self._manifest: dict[str, Any] = {}
        self._identity: dict[str, Any] = {}
        self._monitor = Monitor()

    @contextmanager
    def open(self, initial: Arrays, identity: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[RunState]:
        """Yield the state to start from, with the files locked against other processes.

        Raises `FedcontextError` if the checkpoint was made with other settings (``identity``).
        """
        self._manifest, self._identity = dict(settings), json.loads(json.dumps(identity, default=str))
        with ExitStack() as stack:
            for path in self._files:
                stack.enter_context(lock(path, ENDING))
                clean(path)
            state, done = self._resumed(initial), list[RoundRecord]()
            if self._records:
                self._active, done = stack.enter_context(open_run(self._records, self._manifest, state.number))
            self._monitor = Monitor(self._manifest, done)
            yield state

    def _resumed(self, initial: Arrays) -> RunState:
        path = self._checkpoint
        if path is None or not checkpoint.exists(path):
            return RunState(0, initial)
        saved = checkpoint.load(path, initial, self._identity)
        number, loss, lost = (saved.facts[name] for name in ("number", "loss", "lost"))
        log.info("Resuming after round %d from %s", number, path)
        return RunState(number, saved.params, Carried(**saved.rule), loss, lost)

    def write(self, state: RunState, record: RoundRecord | None) -> None:
        """Write a round's record, then its checkpoint: after a crash between the two the round is repeated.

        A finding about the run is logged when it is first seen.
        """
        for finding in self._monitor.add(record) if record else ():
            log.warning("\t> %s", finding)
        if self._active and record:
            list(append_records(self._active, self._manifest, [record]))
        if self._checkpoint:
            facts = {**self._identity, "number": state.number, "lost": state.lost, "loss": state.loss}
            after = self._active if self._active and self._active.exists() else None
            checkpoint.save(self._checkpoint, state.params, vars(state.carried), facts, after=after)

    def log_findings(self) -> None:
        """Log what is wrong with the run at its end."""
        for finding in diagnose(self._monitor.records, self._manifest):
            log.warning("Diagnosis: %s", finding)
