"""The files that TensorBoard reads."""

import contextlib
import logging
import platform
import struct
import time
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

log = logging.getLogger(__package__.partition(".")[0])


class Events:
    """TensorBoard's file of one start of a run. What was written survives a kill -9.

    tensorboardX's SummaryWriter has a thread for this, which loses the last values of a killed run.
    """

    def __init__(self, directory: Path, start: int):
        self.directory = directory
        self.file: BinaryIO | None = None
        with self.given_up_on_error():
            directory.mkdir(exist_ok=True)
            # Read in the order of their names. Two starts within a second must not share one.
            name = f"events.out.tfevents.{time.time_ns()}.{platform.node()}"
            self.file = (directory / name).open("xb", buffering=0)
            # Readers drop what an interrupted run wrote beyond the step it now goes on from.
            log_start = SessionLog(status=SessionLog.START)
            self.put(
                Event(wall_time=time.time(), file_version="brain.Event:2"),
                Event(wall_time=time.time(), step=start + 1, session_log=log_start),
            )

    def write(self, step: int, summary: Summary) -> None:
        """Add a point of a curve, an image, a histogram or a text."""
        with self.given_up_on_error():
            self.put(Event(wall_time=time.time(), step=step, summary=summary))

    def put(self, *events: Event) -> None:
        data = b"".join(map(record, events))
        if self.file and self.file.write(data) < len(data):
            raise OSError("only a part could be written")

    @contextlib.contextmanager
    def given_up_on_error(self) -> Generator[None]:
        """No more is written after an error: readers stop at half an event anyway."""
        try:
            yield
        except OSError as error:
            self.close()
            log.warning("%s: TensorBoard gets no more values (%s)", self.directory, error)

    def close(self) -> None:
        if self.file:
            self.file.close()
        self.file = None


def record(event: Event) -> bytes:
    """An event as the file has it: its length and its bytes, each followed by a checksum."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    parts = (length, masked_crc32c(length), data, masked_crc32c(data))
    return b"".join(x if isinstance(x, bytes) else struct.pack("<I", x) for x in parts)
