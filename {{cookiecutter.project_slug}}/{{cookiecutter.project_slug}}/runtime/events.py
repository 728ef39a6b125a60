"""The event files that TensorBoard reads."""

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
    """The event file of one start of a run. What was written survives a kill -9.

    tensorboardX's SummaryWriter writes from a thread and loses the last values of a killed run.
    """

    def __init__(self, directory: Path, start: int):
        self.directory = directory
        self.file: BinaryIO | None = None
        with self.closing_on_error():
            directory.mkdir(exist_ok=True)
            # TensorBoard reads the files in the order of their names, so these begin with the time,
            # in nanoseconds: two starts within one second need two files.
            name = f"events.out.tfevents.{time.time_ns()}.{platform.node()}"
            self.file = (directory / name).open("xb", buffering=0)
            # Tells TensorBoard to drop what an interrupted start wrote after the step from which
            # this one continues.
            log_start = SessionLog(status=SessionLog.START)
            self.append(
                Event(wall_time=time.time(), file_version="brain.Event:2"),
                Event(wall_time=time.time(), step=start + 1, session_log=log_start),
            )

    def write(self, step: int, summary: Summary) -> None:
        """Add a point of a curve, an image, a histogram or a text."""
        with self.closing_on_error():
            self.append(Event(wall_time=time.time(), step=step, summary=summary))

    def append(self, *events: Event) -> None:
        """Append events to the file. Raises OSError if they could not be written as a whole."""
        data = b"".join(map(record, events))
        if self.file and self.file.write(data) < len(data):
            raise OSError("only a part could be written")

    @contextlib.contextmanager
    def closing_on_error(self) -> Generator[None]:
        """After an OSError inside, warn and write no more: TensorBoard stops at half an event."""
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
    """The bytes of an event in the file: its length and its message, a checksum after each."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    parts = (length, masked_crc32c(length), data, masked_crc32c(data))
    return b"".join(x if isinstance(x, bytes) else struct.pack("<I", x) for x in parts)
